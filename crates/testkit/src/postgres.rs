//! A private Postgres: a cluster in a directory, reached by its socket, removed by its guard. It can be stopped, killed
//! and frozen.
//!
//! Postgres refuses to run as root, so root runs it as the user `postgres`. `setpriv` also ties it to the thread that
//! started it, so that nothing remains when a test is killed.

use std::{
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use tokio_postgres::{Client, NoTls, SimpleQueryMessage};

use crate::TempDir;

const READY_TIMEOUT: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(10);
const USER: &str = "postgres";
/// Default port of Postgres.
const DEFAULT_PORT: u16 = 5432;
/// Name of the database that servers use.
const DATABASE: &str = "windlass";

/// Settings of every cluster. No test cuts the power of the machine: written data survives the death of every process. No
/// test replicates, and a log of a gigabyte would be in memory.
pub const TEST_SETTINGS: [&str; 7] = [
    "listen_addresses=",
    "fsync=off",
    "full_page_writes=off",
    "shared_buffers=64MB",
    "wal_level=minimal",
    "max_wal_senders=0",
    "max_wal_size=256MB",
];

/// Shutdown mode of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShutdownMode {
    /// Closes connections and writes all committed data.
    Fast,
    /// Without notice; the log is replayed at the next start.
    Immediate,
}

pub struct Postgres {
    server: Option<Child>,
    bin: PathBuf,
    options: Vec<String>,
    env: Vec<(String, String)>,
    port: u16,
    // Last: the directory is deleted after the server has stopped.
    home: TempDir,
}

impl Postgres {
    /// Starts a new cluster with an empty database.
    pub async fn start(name: &str) -> Result<Self> {
        Self::start_with(name, &[], Vec::new()).await
    }

    /// Starts a cluster that also listens on a loopback port, as for clients on other machines.
    pub async fn start_on_port(name: &str) -> Result<Self> {
        let port = crate::ports::reserve_free_port();
        Self::start_as(name, &["listen_addresses=127.0.0.1"], Vec::new(), port).await
    }

    /// Starts a cluster with settings such as `log_statement=all` and an environment.
    pub async fn start_with(name: &str, settings: &[&str], env: Vec<(String, String)>) -> Result<Self> {
        Self::start_as(name, settings, env, DEFAULT_PORT).await
    }

    async fn start_as(name: &str, settings: &[&str], env: Vec<(String, String)>, port: u16) -> Result<Self> {
        let (bin, home) = (find_programs()?, crate::temp_dir_in(&crate::database_dir(), name)?);
        let data = home.path().join("data");
        if is_root() {
            std::os::unix::fs::chown(home.path(), Some(id("-u")?), Some(id("-g")?))?;
        }
        let mut initdb = command_as_owner(&bin.join("initdb"), &[]);
        initdb.args(["--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync", "--username", USER]);
        let made = initdb.arg("-D").arg(&data).output().context("run initdb")?;
        ensure!(made.status.success(), "initdb: {}", String::from_utf8_lossy(&made.stderr));
        let options = settings.iter().map(|setting| (*setting).to_owned()).collect();
        let mut cluster = Self { server: None, bin, options, env, port, home };
        cluster.up().await?;
        cluster.run_in(USER, &format!("CREATE DATABASE {DATABASE}")).await?;
        Ok(cluster)
    }

    /// Starts the server and waits until it responds.
    pub async fn up(&mut self) -> Result<()> {
        let mut command = command_as_owner(&self.bin.join("postgres"), &self.env);
        command.arg("-D").arg(self.home.path().join("data")).arg("-k").arg(self.sockets());
        command.args(["-c", "max_connections=100"]);
        command.arg("-p").arg(self.port.to_string());
        for setting in TEST_SETTINGS.into_iter().chain(self.options.iter().map(String::as_str)) {
            command.args(["-c", setting]);
        }
        let log = std::fs::File::options().create(true).append(true).open(self.home.path().join("log"))?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        self.server = Some(command.spawn().context("start Postgres (is it installed?)")?);
        let began = Instant::now();
        while let Err(error) = self.run_in(USER, "SELECT 1").await {
            let log = std::fs::read_to_string(self.home.path().join("log")).unwrap_or_default();
            ensure!(began.elapsed() < READY_TIMEOUT, "Postgres does not answer: {error:#}\n{log}");
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }

    /// Stops the server and waits for its end.
    pub fn down(&mut self, how: ShutdownMode) -> Result<()> {
        let mut server = self.server.take().context("Postgres is down already")?;
        let signal = match how {
            ShutdownMode::Fast => "-INT",
            ShutdownMode::Immediate => "-QUIT",
        };
        let status = Command::new("kill").args([signal, &server.id().to_string()]).status()?;
        ensure!(status.success(), "signal Postgres");
        server.wait()?;
        Ok(())
    }

    /// Directory of its socket.
    pub fn sockets(&self) -> &Path {
        self.home.path()
    }

    /// Data directory, for example to fill its disk.
    pub fn data(&self) -> PathBuf {
        self.home.path().join("data")
    }

    /// Port of a cluster that was started with one.
    pub const fn port(&self) -> u16 {
        self.port
    }

    /// Writes a file of the cluster, such as its private key or `pg_hba.conf`.
    pub fn write_file(&self, name: &str, text: &[u8]) -> Result<()> {
        let path = self.data().join(name);
        std::fs::write(&path, text)?;
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
        if is_root() {
            std::os::unix::fs::chown(&path, Some(id("-u")?), Some(id("-g")?))?;
        }
        Ok(())
    }

    /// URL for a server.
    pub fn url(&self) -> String {
        url(self.sockets())
    }

    /// Runs statements in the servers' database; returns the rows of the last as text.
    pub async fn run(&self, sql: &str) -> Result<Vec<Vec<String>>> {
        self.run_in(DATABASE, sql).await
    }

    /// Runs statements outside of the servers' database.
    pub async fn admin(&self, sql: &str) -> Result<()> {
        self.run_in(USER, sql).await.map(drop)
    }

    /// Opens a session in the servers' database, for the caller to hold.
    pub async fn session(&self) -> Result<Client> {
        self.connect(DATABASE).await
    }

    /// Runs a query that returns one number.
    pub async fn count(&self, sql: &str) -> Result<i64> {
        let rows = self.run(sql).await?;
        let value = rows.first().and_then(|row| row.first()).context("no row")?;
        value.parse().with_context(|| format!("read {value:?} as a number"))
    }

    async fn connect(&self, database: &str) -> Result<Client> {
        let mut config = tokio_postgres::Config::new();
        config
            .host_path(self.sockets())
            .port(self.port)
            .user(USER)
            .dbname(database)
            .application_name("watcher");
        let (client, connection) = config.connect(NoTls).await?;
        // Ends with its client.
        tokio::spawn(connection);
        Ok(client)
    }

    async fn run_in(&self, database: &str, sql: &str) -> Result<Vec<Vec<String>>> {
        let client = self.connect(database).await?;
        let answered = client.simple_query(sql).await;
        let mut rows = Vec::new();
        for message in answered.with_context(|| sql.to_owned())? {
            if let SimpleQueryMessage::Row(row) = message {
                rows.push((0..row.len()).map(|at| row.get(at).unwrap_or_default().to_owned()).collect());
            }
        }
        Ok(rows)
    }
}

/// URL of the servers' database through a socket in this directory: that of the cluster, or of a proxy in front of it.
pub fn url(sockets: &Path) -> String {
    format!("postgres:///{DATABASE}?user={USER}&host={}", sockets.display())
}

/// File name of the socket in the directory that clients use.
pub const SOCKET: &str = ".s.PGSQL.5432";

impl Drop for Postgres {
    fn drop(&mut self) {
        if self.server.is_some() {
            let _ = self.down(ShutdownMode::Immediate);
        }
    }
}

/// Returns the newest version that Debian installed.
fn find_programs() -> Result<PathBuf> {
    let version = |path: &Path| path.file_name()?.to_str()?.parse::<u32>().ok();
    let installed =
        std::fs::read_dir("/usr/lib/postgresql").context("find Postgres: `apt-get install postgresql`")?;
    let newest = installed.flatten().map(|entry| entry.path()).filter(|path| version(path).is_some());
    let newest = newest.max_by_key(|path| version(path)).map(|path| path.join("bin"));
    newest.filter(|bin| bin.join("initdb").is_file()).context("find initdb below /usr/lib/postgresql")
}

fn is_root() -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|here| std::os::unix::fs::MetadataExt::uid(&here) == 0)
}

fn id(which: &str) -> Result<u32> {
    let message = Command::new("id").args([which, USER]).output().context("run id")?;
    ensure!(message.status.success(), "there is no user `{USER}`");
    Ok(String::from_utf8(message.stdout)?.trim().parse()?)
}

/// The environment applies only to the program: `setpriv` still runs as root.
fn command_as_owner(program: &Path, env: &[(String, String)]) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "QUIT"]).current_dir("/");
    if is_root() {
        command.args(["--reuid", USER, "--regid", USER, "--clear-groups"]);
    }
    command.arg("--").arg("env").args(env.iter().map(|(name, value)| format!("{name}={value}"))).arg(program);
    command
}
