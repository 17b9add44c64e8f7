"""The server program: a shard behind gRPC."""

from psfleet.wire import process

process.prepare()  # before any module of this package imports gRPC
