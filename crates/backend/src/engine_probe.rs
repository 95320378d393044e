//! Detection of a container engine on this machine.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
};

const DEFAULT_SOCKET: &str = "/var/run/docker.sock";
/// A healthy engine responds within a millisecond.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(3);
const RESPONSE_MAX: u64 = 4096;

/// Result of the detection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EngineProbe {
    At(PathBuf),
    /// With a clause for users: `no Docker engine at /var/run/docker.sock`.
    None {
        why: String,
    },
}

/// Locations to search: the configured socket, otherwise `DOCKER_HOST`, otherwise the usual sockets.
#[derive(Clone, Debug, Default)]
pub struct EngineSearch {
    pub named: Option<PathBuf>,
    pub docker_host: Option<String>,
    pub runtime_dir: Option<PathBuf>,
}

impl EngineSearch {
    pub fn here(named: Option<PathBuf>) -> Self {
        let set = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        Self {
            named,
            docker_host: set("DOCKER_HOST").map(|host| host.to_string_lossy().into_owned()),
            runtime_dir: set("XDG_RUNTIME_DIR").map(PathBuf::from),
        }
    }

    fn sockets(&self) -> Result<Vec<PathBuf>, String> {
        if let Some(named) = &self.named {
            return Ok(vec![named.clone()]);
        }
        if let Some(host) = &self.docker_host {
            return match host.strip_prefix("unix://") {
                Some(path) => Ok(vec![path.into()]),
                None => Err(format!("unsupported `DOCKER_HOST` value `{host}`: expected a unix:// socket")),
            };
        }
        let own = self.runtime_dir.iter();
        let own = own.flat_map(|dir| [dir.join("docker.sock"), dir.join("podman/podman.sock")]);
        Ok([DEFAULT_SOCKET, "/run/podman/podman.sock"].map(PathBuf::from).into_iter().chain(own).collect())
    }

    /// Probes each socket in turn and returns the first that responds.
    pub async fn inspect(&self) -> EngineProbe {
        let sockets = match self.sockets() {
            Ok(sockets) => sockets,
            Err(why) => return EngineProbe::None { why },
        };
        // An engine that fails takes precedence over one that is absent, because a user can fix it.
        let (mut absent, mut broken) = (None, None);
        for socket in sockets {
            match ping(&socket).await {
                Ok(()) => return EngineProbe::At(socket),
                Err(PingError::Absent) => {
                    absent.get_or_insert_with(|| format!("no Docker engine at {}", socket.display()));
                }
                Err(PingError::Failed(message)) => {
                    let socket = socket.display();
                    broken.get_or_insert_with(|| {
                        format!("the Docker engine at {socket} cannot be used: {message}")
                    });
                }
            }
        }
        EngineProbe::None { why: broken.or(absent).unwrap_or_else(|| "no Docker engine".to_owned()) }
    }
}

enum PingError {
    Absent,
    Failed(String),
}

async fn ping(socket: &Path) -> Result<(), PingError> {
    let requested = tokio::time::timeout(RESPONSE_TIMEOUT, async {
        let mut stream = UnixStream::connect(socket).await?;
        stream.write_all(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n").await?;
        let mut answer = Vec::new();
        stream.take(RESPONSE_MAX).read_to_end(&mut answer).await?;
        Ok::<_, std::io::Error>(answer)
    });
    match requested.await {
        Ok(Ok(answer)) => {
            let head = String::from_utf8_lossy(&answer);
            let first = head.lines().next().unwrap_or_default();
            if first.split_whitespace().nth(1) == Some("200") {
                return Ok(());
            }
            Err(PingError::Failed(if first.is_empty() { "no response".into() } else { first.into() }))
        }
        Ok(Err(error)) if error.kind() == std::io::ErrorKind::NotFound => Err(PingError::Absent),
        Ok(Err(error)) => Err(PingError::Failed(error.to_string())),
        Err(_) => Err(PingError::Failed(format!("no response within {} s", RESPONSE_TIMEOUT.as_secs()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn why(places: EngineSearch) -> String {
        match places.inspect().await {
            EngineProbe::At(at) => panic!("found one at {}", at.display()),
            EngineProbe::None { why } => why,
        }
    }

    #[tokio::test]
    async fn error_for_a_missing_engine_names_the_searched_address() {
        let at = |path: &str| EngineSearch { named: Some(path.into()), ..EngineSearch::default() };
        assert_eq!(why(at("/nowhere/docker.sock")).await, "no Docker engine at /nowhere/docker.sock");
        let remote =
            EngineSearch { docker_host: Some("tcp://10.0.0.1:2375".into()), ..EngineSearch::default() };
        assert!(why(remote).await.contains("tcp://10.0.0.1:2375"));
    }

    #[tokio::test]
    async fn engine_probe_error_quotes_an_unexpected_response() {
        let dir = windlass_testkit::temp_dir("engine").unwrap();
        let path = dir.path().join("docker.sock");
        let listener = tokio::net::UnixListener::bind(&path).unwrap();
        let silent = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut requested = [0; 37];
            stream.read_exact(&mut requested).await.unwrap();
            stream.write_all(b"HTTP/1.0 503 Busy\r\n\r\n").await.unwrap();
        });
        let message = why(EngineSearch { named: Some(path), ..EngineSearch::default() }).await;
        assert!(message.contains("503 Busy"), "{message}");
        silent.await.unwrap();
    }
}
