"""Draw what a person sees. Every function takes the Rich console to print on and is otherwise pure."""
