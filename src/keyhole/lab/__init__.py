"""What researchers use: costs, certificates, and servers of planted targets."""
