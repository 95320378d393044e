//! How many replicas.
