"""What the commands of the terminal look at: checkpoints on the disk, this machine, servers that run, conversations."""
