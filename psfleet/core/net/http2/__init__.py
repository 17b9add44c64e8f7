"""Unary gRPC calls over HTTP/2 and blocking sockets. psfleet's tensor calls use this instead of grpcio."""
