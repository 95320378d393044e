//! The model, tested as data: one binary, one module per part.

mod machines;
