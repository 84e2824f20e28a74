"""Device, topology, start-up and collectives."""
