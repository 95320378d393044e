//! AWS on this machine: moto from PyPI, with what it lacks of EC2.

use std::{
    fs,
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use serde_json::Value;

use crate::{TempDir, ports::reserve_free_port, wait::eventually};

/// Environment variable with the Python environment of moto, which `cargo xtask test` makes.
pub const VARIABLE: &str = "WINDLASS_TEST_MOTO";
/// Image that moto knows in all regions.
pub const IMAGE_PARAMETER: &str = "/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-x86_64";
const SCRIPT: &str = include_str!("server.py");

/// Machine that was created there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartedMachine {
    pub id: String,
    /// Public address.
    pub address: String,
    /// Script of its first start.
    pub user_data: String,
    pub zone: String,
    /// `spot` or `on-demand`.
    pub market: String,
}

/// The server ends when this is dropped.
pub struct MotoServer {
    process: Child,
    port: u16,
    dir: TempDir,
}

impl MotoServer {
    /// Starts a server, which knows no machine.
    ///
    /// # Panics
    /// If the environment has no moto, or if it does not start.
    #[must_use]
    #[expect(clippy::expect_used, reason = "for tests: what cannot start says so")]
    pub fn start() -> Self {
        let venv = std::env::var_os(VARIABLE).map(PathBuf::from);
        let venv = venv.expect(
            "WINDLASS_TEST_MOTO names no Python environment with moto; `cargo xtask test` makes one, and sets it",
        );
        let dir = crate::temp_dir("moto").expect("make the directory of moto");
        let script = dir.path().join("server.py");
        fs::write(&script, SCRIPT).expect("write the script of moto");
        let log = fs::File::create(dir.path().join("log")).expect("create the log of moto");
        let port = reserve_free_port();
        let process = Command::new(venv.join("bin/python"))
            .arg(&script)
            .arg(port.to_string())
            .arg(dir.path())
            .current_dir(dir.path())
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("share the log of moto"))
            .stderr(log)
            .spawn()
            .expect("start Python");
        let mut server = Self { process, port, dir };
        eventually("moto accepts connections", || {
            let ended = server.process.try_wait().expect("look after moto");
            assert!(ended.is_none(), "moto ended early: {}", server.log());
            TcpStream::connect(("127.0.0.1", port)).is_ok()
        });
        server
    }

    /// Endpoint of all its services.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Says what goes wrong from now on, as the script describes.
    ///
    /// # Panics
    /// If the file cannot be written.
    #[expect(clippy::expect_used, reason = "for tests: what cannot be written says so")]
    pub fn control(&self, faults: &Value) {
        let (new, file) = (self.dir.path().join("control.new"), self.dir.path().join("control.json"));
        fs::write(&new, faults.to_string()).expect("write the faults of moto");
        fs::rename(new, file).expect("replace the faults of moto");
    }

    /// Machines that were created, in the order of their ids.
    ///
    /// # Panics
    /// If their descriptions cannot be read.
    #[must_use]
    #[expect(clippy::expect_used, reason = "for tests: what cannot be read says so")]
    pub fn started(&self) -> Vec<StartedMachine> {
        let Ok(entries) = fs::read_dir(self.dir.path().join("started")) else { return Vec::new() };
        let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        let mut ids: Vec<String> = names.filter(|name| !name.starts_with('.')).collect();
        ids.sort();
        let read = |id: String| {
            let text = fs::read(self.dir.path().join("started").join(&id)).expect("read a machine");
            let about: Value = serde_json::from_slice(&text).expect("a machine is JSON");
            let of = |key: &str| about[key].as_str().unwrap_or_default().to_owned();
            let (address, user_data) = (of("address"), of("user_data"));
            StartedMachine { id, address, user_data, zone: of("zone"), market: of("market") }
        };
        ids.into_iter().map(read).collect()
    }

    /// Everything that it has printed.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    /// Directory of its files.
    #[must_use]
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }
}

impl Drop for MotoServer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
