/*
 * build_info.c - what this library was built from, for `doctor` and for bug reports.
 */
#include "kernels.h"

#ifndef FY_LIBURING_VERSION
#define FY_LIBURING_VERSION "of unknown version"
#endif

#if defined(__clang__)
#define COMPILER "clang " __clang_version__
#elif defined(__GNUC__)
#define COMPILER "gcc " __VERSION__
#else
#define COMPILER "an unknown compiler"
#endif

#if FY_WITH_URING
#define RING "liburing " FY_LIBURING_VERSION
#else
#define RING "no io_uring"
#endif

#ifdef FY_NO_CLONES
#define LOOPS "one portable loop"
#else
#define LOOPS "clones x86-64-v4, x86-64-v3, default"
#endif

FY_API const char *fy_build_info(void)
{
    return COMPILER "; " RING "; " LOOPS;
}

FY_API uint32_t fy_abi_version(void)
{
    return FY_ABI_VERSION;
}
