"""Messages and cache ids to segments."""
