"""What every test wants: time enough for a drawn example on a busy machine, and what to repeat when one fails."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("fuyou", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("fuyou")
