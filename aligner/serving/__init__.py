"""The critic job's wire: protocol, server, clients."""
