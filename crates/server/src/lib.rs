//! The control plane: routes, services, pipelines and the one place that speaks SQL.

pub mod db;
pub mod secrets;
