//! What may change in place.
