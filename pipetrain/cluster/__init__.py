"""Everything about other processes and hosts: starting, finding, joining and watching workers, measuring links."""
