"""Worker processes and hosts: starting, finding, joining and watching workers, and measuring links."""
