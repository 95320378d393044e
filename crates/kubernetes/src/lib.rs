//! Backend `kubernetes`: an instance is a pod, made for one job.
//!
//! The container of the pod runs the image of the job. Its first process is the agent, which an init container places
//! beside it in a shared directory, so no image is changed. The server reaches the agent through the exec stream of the
//! API server, as it reaches others through SSH channels: access to the API is all that is needed.

mod api_client;
mod backend;
mod exec_stream;
mod kubeconfig;
mod login;
mod nodes;
mod objects;
mod pod_manifest;
mod pod_state;
mod quantity;
mod settings;
mod tls;

pub use backend::{KubernetesBackend, NAME};
pub use settings::{KubeconfigSource, KubernetesSettings, SettingsError};
