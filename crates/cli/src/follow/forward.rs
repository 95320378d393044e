//! Forwards ports of a job to local addresses while the run is followed.
//!
//! Each incoming connection uses a separate connection to the server, so a restart of the server ends only the
//! connections that are open at that time.

use std::{net::IpAddr, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    task::JoinSet,
};
use uuid::Uuid;
use windlass_api::{client::ApiClient, runs::ConnectRequest};
use windlass_model::config::ports::PortMapping;

use super::{events::EventWriter, progress::JobProgress};
use crate::{context::Context, error::CliError, output};

/// Maximum number of open connections.
const CONNECTIONS_MAX: usize = 256;
/// Delay after a failed accept, because an immediate retry would fail as well.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// Ports to forward, and their job.
#[derive(Clone, Debug)]
pub(crate) struct ForwardSpec {
    /// Local address to listen on.
    pub(crate) host: IpAddr,
    pub(crate) ports: Vec<PortMapping>,
    pub(crate) replica: i64,
    pub(crate) job: i64,
}

/// Local ports, bound before anything is started so that a port in use is reported early.
pub(crate) struct PortForwards {
    wanted: ForwardSpec,
    bound: Vec<(u16, TcpListener)>,
    servers: JoinSet<()>,
    target: Arc<Mutex<Option<Uuid>>>,
}

impl PortForwards {
    pub(crate) async fn bind(wanted: ForwardSpec) -> Result<Self, CliError> {
        let mut bound = Vec::new();
        for port in &wanted.ports {
            let local = port.local_port.unwrap_or(0);
            let listener = TcpListener::bind((wanted.host, local)).await.map_err(|error| {
                CliError::from_error(&format!("failed to listen on port {local} of this machine"), &error)
                    .hint(format!(
                        "use `-p LOCAL:{}` for another port, or `-p '*:{0}'` for any free port",
                        port.container_port
                    ))
            })?;
            bound.push((port.container_port, listener));
        }
        Ok(Self { wanted, bound, servers: JoinSet::new(), target: Arc::default() })
    }

    /// Switches to a running job or to its new submission. The first call opens and prints the ports.
    pub(crate) fn switch_to(
        &mut self,
        cx: &Context,
        run: &str,
        jobs: &[JobProgress],
        as_events: bool,
    ) -> Result<(), CliError> {
        let is_ours = |job: &&JobProgress| (job.replica, job.job) == (self.wanted.replica, self.wanted.job);
        let running = jobs.iter().find(is_ours).filter(|job| job.status == "running");
        *self.target.lock() = running.map(|job| job.submission);
        if running.is_none() || self.bound.is_empty() {
            return Ok(());
        }
        let client = Arc::new(cx.client.clone());
        for (port, listener) in self.bound.drain(..) {
            let address = listener.local_addr().map(|address| address.to_string()).unwrap_or_default();
            if as_events {
                EventWriter::port(port, &address);
            } else {
                output::print_message(&format!("Port {port} of the job: http://{address}"));
            }
            let line = PortForward {
                client: Arc::clone(&client),
                project: cx.project.clone(),
                run: run.to_owned(),
                port,
                target: Arc::clone(&self.target),
                places: Arc::new(Semaphore::new(CONNECTIONS_MAX)),
                message: Arc::default(),
            };
            self.servers.spawn(line.serve(listener));
        }
        Ok(())
    }
}

/// One forwarded port.
#[derive(Clone)]
struct PortForward {
    client: Arc<ApiClient>,
    project: String,
    run: String,
    port: u16,
    target: Arc<Mutex<Option<Uuid>>>,
    places: Arc<Semaphore>,
    /// Last warning, which is not repeated.
    message: Arc<Mutex<String>>,
}

impl PortForward {
    async fn serve(self, listener: TcpListener) {
        let mut guests = JoinSet::new();
        loop {
            let Ok(place) = Arc::clone(&self.places).acquire_owned().await else { return };
            let Ok((guest, _)) = listener.accept().await else {
                tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
                continue;
            };
            let line = self.clone();
            guests.spawn(async move {
                line.forward_connection(guest).await;
                drop(place);
            });
            while guests.try_join_next().is_some() {}
        }
    }

    async fn forward_connection(&self, mut guest: TcpStream) {
        let Some(job_submission_id) = *self.target.lock() else {
            return self.warn_once("the job is not running");
        };
        let _ = guest.set_nodelay(true);
        let request = ConnectRequest { run_name: self.run.clone(), job_submission_id, port: self.port };
        match self.client.connect_job(&self.project, &request).await {
            Ok(mut far) => {
                // Either side may close at any time: this is the normal end of a connection.
                let _ = copy_bidirectional(&mut guest, &mut far).await;
                self.message.lock().clear();
            }
            Err(error) => self.warn_once(&error.to_string()),
        }
    }

    fn warn_once(&self, why: &str) {
        let mut message = self.message.lock();
        if *message != why {
            output::print_message(&output::printable(&format!("port {}: {why}", self.port)));
            why.clone_into(&mut message);
        }
    }
}
