"""The round and its vocabulary. Pure: knows no part by name, reads and writes no files."""
