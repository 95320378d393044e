//! The wire: request and response types, the operation table, one typed HTTP client.
