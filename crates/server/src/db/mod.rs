//! All the SQL, over one thin facade for SQLite and Postgres.
//!
//! A write is a `Unit`: data, not a closure. It is handed over whole, committed whole together with
//! many others (group commit), and acknowledged after the commit. So no transaction can be open
//! across a network call: nobody outside this folder ever sees one.

pub mod unit;
pub mod value;

pub use unit::{Change, Expect, Guard, Unit, Written};
pub use value::{Row, Val};
