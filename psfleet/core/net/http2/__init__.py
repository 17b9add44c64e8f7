"""Unary gRPC calls over HTTP/2 and blocking sockets: what the hot methods use instead of grpcio."""
