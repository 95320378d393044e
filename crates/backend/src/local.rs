//! This machine: an agent of our own beside the server.
