"""What to do, decided in pure Python and NumPy: schedules, weight versions, profiles, partitions, traces."""
