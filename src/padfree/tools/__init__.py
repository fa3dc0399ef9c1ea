"""What the commands are made of. A tool may import every other part; the command line alone imports a tool."""
