"""The optimizer steps what `parallel` exposes; it sends nothing itself."""
