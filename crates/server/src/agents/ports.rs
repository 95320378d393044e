//! Streams to ports of jobs: user traffic, separate from the connection that controls the host.
//!
//! Each stream is a separate connection to the shim's socket. On an SSH host it is a channel of the second connection,
//! whose channels buffer a limited number of bytes each: a stalled download does not delay a stop.

use std::sync::Arc;

use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncRead, AsyncWrite, copy_bidirectional},
    time::timeout,
};
use windlass_api::{agent::ports, unix};
use windlass_backend::AgentEndpoint;
use windlass_model::{
    error_chain::format_chain,
    id::{InstanceId, SubmissionId},
};
use windlass_tunnel::Connection;

use super::{
    CALL_TIMEOUT,
    connection_pool::{
        ConnectError, ConnectFailure, queue_failure, ssh_failure, target_failure, transient_failure,
    },
    http_agents::{CallError, Inner},
    ssh_target,
};

/// An open stream to a port of a job.
pub struct PortStream {
    stream: TokioIo<Upgraded>,
    /// Must live as long as the channel that uses it.
    _below: Option<Arc<Connection>>,
}

impl PortStream {
    pub(crate) fn stream(&mut self) -> &mut TokioIo<Upgraded> {
        &mut self.stream
    }

    /// Copies bytes in both directions until both sides have ended or one is lost.
    pub async fn join(mut self, other: &mut (impl AsyncRead + AsyncWrite + Unpin)) -> std::io::Result<()> {
        copy_bidirectional(&mut self.stream, other).await.map(drop)
    }
}

impl std::fmt::Debug for PortStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Port").finish_non_exhaustive()
    }
}

impl Inner {
    pub(super) async fn port(
        &self,
        instance: InstanceId,
        task: SubmissionId,
        port: u16,
    ) -> Result<PortStream, CallError> {
        let opened = async {
            let (reach, credential, machine) = self.state(instance).await.map_err(no_connection)?;
            match reach {
                AgentEndpoint::Socket { path } => {
                    let stream = unix::connect(&path).await;
                    let stream =
                        stream.map_err(|error| no_connection(transient_failure(format_chain(&error))))?;
                    let stream = ports::connect(stream, &credential, task, port).await;
                    Ok(PortStream { stream: stream.map_err(CallError::Shim)?, _below: None })
                }
                AgentEndpoint::Ssh { socket } => {
                    let below = self.traffic(instance).await.map_err(no_connection)?;
                    let stream =
                        below.open_unix(&socket).await.map_err(|error| no_connection(ssh_failure(error)))?;
                    let stream = ports::connect(stream, &credential, task, port).await;
                    Ok(PortStream { stream: stream.map_err(CallError::Shim)?, _below: Some(below) })
                }
                AgentEndpoint::Queue => Err(no_connection(queue_failure())),
                AgentEndpoint::Backend { backend } => {
                    let stream = self.backend_stream(&backend, &machine).await.map_err(no_connection)?;
                    let stream = ports::connect(stream, &credential, task, port).await;
                    Ok(PortStream { stream: stream.map_err(CallError::Shim)?, _below: None })
                }
            }
        };
        timeout(CALL_TIMEOUT, opened).await.unwrap_or(Err(CallError::Timeout(CALL_TIMEOUT)))
    }

    async fn traffic(&self, instance: InstanceId) -> Result<Arc<Connection>, ConnectFailure> {
        let hosts = self.lines.hosts();
        let site = ssh_target::load_target(&self.db, &self.keys, instance)
            .await
            .map_err(|error| target_failure(&error))?;
        let (below, _) = hosts.traffic_connection(&instance, &site.target).await.map_err(ssh_failure)?;
        if let Err(error) = ssh_target::pin(&self.db, instance, &below.host_keys()).await {
            // As for the control connection: a connection is not used before the key of its host is pinned.
            hosts.forget(&instance);
            return Err(target_failure(&error));
        }
        Ok(below)
    }
}

fn no_connection(setback: ConnectFailure) -> CallError {
    let why: ConnectError = setback.why;
    CallError::NoConnection(why)
}
