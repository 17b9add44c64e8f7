"""The gRPC methods of a server."""
