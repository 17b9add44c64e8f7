"""Cluster side of a training script: the runtime that talks to the servers of a fleet."""

from psfleet.core.net.connections import grpc_process

grpc_process.prepare()  # before any module of this package imports gRPC
