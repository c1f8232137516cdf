"""Processes: started, watched, restarted, stopped."""
