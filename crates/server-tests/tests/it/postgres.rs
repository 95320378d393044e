//! A private Postgres for tests: one cluster per test run, one database per test.
//!
//! nextest runs every test in a separate process. The first one that needs Postgres starts the cluster under a file
//! lock, the others find it. A watchdog in a separate session is the parent of the server: when the run's process is
//! gone it stops the server and removes the directory, so that nothing is left behind however the run ended.

use std::{
    fs::{self, File},
    os::unix::process::parent_id,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use tokio_postgres::NoTls;
use windlass_server::db::{DatabaseUrl, Db};

const MISSING: &str = "Postgres is not installed; run `apt-get install postgresql`";
const TEMPLATE: &str = "windlass_template";
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// `$1` is the process with which the server ends, `$2` the directory, `$3` a file whose presence keeps the directory,
/// the rest is the command of the server.
const WATCHDOG_SCRIPT: &str = r#"
parent=$1 dir=$2 keep=$3
shift 3
"$@" >>"$dir/log" 2>&1 &
server=$!
while kill -0 "$parent" 2>/dev/null && kill -0 "$server" 2>/dev/null; do sleep 0.2; done
kill -QUIT "$server" 2>/dev/null
wait "$server"
[ -e "$keep" ] || rm -rf "$dir"
"#;

/// A running cluster.
pub(crate) struct Cluster {
    dir: PathBuf,
}

impl Cluster {
    /// The cluster of the test run, started by the first test that needs it.
    async fn shared() -> Self {
        // Under nextest the run outlives this process; under `cargo test` this process is the run.
        let (key, owner) = match std::env::var("NEXTEST_RUN_ID") {
            Ok(run) => (run, parent_id()),
            Err(_) => (format!("pid-{}", std::process::id()), std::process::id()),
        };
        let dir = windlass_testkit::database_dir().join(format!("windlass-pg-{key}"));
        let cluster = Self { dir: dir.clone() };
        fs::create_dir_all(&dir).unwrap();
        let lock = File::create(dir.join("lock")).unwrap();
        lock.lock().unwrap();
        if !dir.join("ready").exists() {
            cluster.start(owner).await;
            cluster.admin(&format!("CREATE DATABASE {TEMPLATE}")).await;
            let template = Db::open(&cluster.url(TEMPLATE)).await.unwrap();
            template.close().await;
            File::create(dir.join("ready")).unwrap();
        }
        cluster
    }

    /// A separate cluster for a test that stops or breaks it.
    pub(crate) async fn own() -> Self {
        let owner = std::process::id();
        let cluster = Self { dir: windlass_testkit::database_dir().join(format!("windlass-pg-own-{owner}")) };
        fs::create_dir_all(&cluster.dir).unwrap();
        cluster.start(owner).await;
        cluster
    }

    async fn start(&self, owner: u32) {
        let bin = bin_dir();
        let data = self.dir.join("data");
        for dir in [&data, &self.sockets()] {
            fs::create_dir_all(dir).unwrap();
            chown_to_postgres(dir);
        }
        if !data.join("PG_VERSION").exists() {
            let mut initdb = as_postgres(&bin.join("initdb"));
            initdb.arg("-D").arg(&data).args([
                "-U",
                "windlass",
                "-A",
                "trust",
                "-E",
                "UTF8",
                "--locale=C",
                "--no-sync",
            ]);
            let made = initdb.output().unwrap();
            assert!(made.status.success(), "initdb: {}", String::from_utf8_lossy(&made.stderr));
        }
        let server = as_postgres(&bin.join("postgres"));
        let mut watchdog = Command::new("setsid");
        watchdog.args(["sh", "-c", WATCHDOG_SCRIPT, "watchdog"]).arg(owner.to_string());
        watchdog.arg(&self.dir).arg(self.keep());
        watchdog.arg(server.get_program()).args(server.get_args()).arg("-D").arg(&data);
        watchdog.arg("-k").arg(self.sockets()).args(["-c", "max_connections=300"]);
        for setting in windlass_testkit::postgres::TEST_SETTINGS {
            watchdog.args(["-c", setting]);
        }
        let mut watchdog =
            watchdog.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        // The watchdog outlives this process; if it does not, this thread reaps it.
        std::thread::spawn(move || watchdog.wait());
        self.wait().await;
    }

    /// Waits until the server answers.
    pub(crate) async fn wait(&self) {
        let began = Instant::now();
        while let Err(error) = tokio_postgres::connect(&self.url_text("postgres"), NoTls).await {
            let log = fs::read_to_string(self.dir.join("log")).unwrap_or_default();
            assert!(began.elapsed() < START_TIMEOUT, "Postgres does not answer: {error}\n{log}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// The next free name: each server of this directory has its own.
    fn keep(&self) -> PathBuf {
        (0..).map(|n| self.dir.join(format!("keep-{n}"))).find(|path| !path.exists()).unwrap()
    }

    fn sockets(&self) -> PathBuf {
        self.dir.join("s")
    }

    fn url_text(&self, database: &str) -> String {
        let sockets = self.sockets();
        format!("postgres:///{database}?user=windlass&host={}", sockets.display())
    }

    pub(crate) fn url(&self, database: &str) -> DatabaseUrl {
        self.url_text(database).parse().unwrap()
    }

    /// Runs one statement outside any test's database.
    pub(crate) async fn admin(&self, sql: &str) {
        let (client, connection) = tokio_postgres::connect(&self.url_text("postgres"), NoTls).await.unwrap();
        let driver = tokio::spawn(connection);
        client.batch_execute(sql).await.unwrap_or_else(|error| panic!("{sql}: {error:?}"));
        driver.abort();
    }

    /// Simulates a power cut: kills all processes of Postgres at once. `start_again` restarts it.
    pub(crate) fn kill(&self) {
        let pid = fs::read_to_string(self.dir.join("data/postmaster.pid")).unwrap();
        let pid = pid.lines().next().unwrap().to_owned();
        // Keeps the watchdog from removing the directory.
        File::create(self.keep()).unwrap();
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
        let pids = std::iter::once(pid.as_str()).chain(children.split_whitespace());
        Command::new("kill").arg("-KILL").args(pids).status().unwrap();
    }

    pub(crate) async fn start_again(&self) {
        // Orphans may not be reaped here, and Postgres treats a dead process that was not reaped as alive.
        for left in ["data/postmaster.pid", "s/.s.PGSQL.5432.lock"] {
            fs::remove_file(self.dir.join(left)).unwrap();
        }
        self.start(std::process::id()).await;
    }
}

/// A separate database for one test, dropped with it.
pub(crate) struct TestDb {
    pub(crate) db: Db,
    cluster: Cluster,
    name: String,
}

impl TestDb {
    pub(crate) async fn open() -> Self {
        let cluster = Cluster::shared().await;
        let name = random_name();
        cluster.admin(&format!("CREATE DATABASE {name} TEMPLATE {TEMPLATE}")).await;
        let db = Db::open(&cluster.url(&name)).await.unwrap();
        Self { db, cluster, name }
    }

    /// An empty database that `count` replicas open at the same moment.
    pub(crate) async fn open_by_many(count: usize) -> (Self, Vec<Db>) {
        let cluster = Cluster::shared().await;
        let name = random_name();
        cluster.admin(&format!("CREATE DATABASE {name}")).await;
        let url = cluster.url(&name);
        let opened = futures_util::future::join_all((0..count).map(|_| Db::open(&url))).await;
        let mut opened: Vec<Db> = opened.into_iter().map(|db| db.unwrap()).collect();
        (Self { db: opened.remove(0), cluster, name }, opened)
    }

    /// The directory of the server's socket.
    pub(crate) fn sockets(&self) -> PathBuf {
        self.cluster.sockets()
    }

    /// URL of the same database through another socket.
    pub(crate) fn url_through(&self, sockets: &Path) -> DatabaseUrl {
        format!("postgres:///{}?user=windlass&host={}", self.name, sockets.display()).parse().unwrap()
    }

    /// Ends all connections but the one that runs the statement, as a router that loses its state does.
    pub(crate) async fn cut_connections(&self) {
        let sql =
            format!("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{}'", self.name);
        self.cluster.admin(&sql).await;
    }

    /// Makes new sessions writable or read-only, as a fail-over does.
    pub(crate) async fn set_writable(&self, yes: bool) {
        let set = if yes { "off" } else { "on" };
        let sql = format!("ALTER DATABASE {} SET default_transaction_read_only = {set}", self.name);
        self.cluster.admin(&sql).await;
    }

    /// A handle of another replica on the same database.
    pub(crate) async fn replica(&self) -> Db {
        Db::open(&self.url().parse().unwrap()).await.unwrap()
    }

    /// URL for a whole server on this database.
    pub(crate) fn url(&self) -> String {
        self.cluster.url_text(&self.name)
    }
}

fn random_name() -> String {
    let mut bytes = [0_u8; 8];
    getrandom::fill(&mut bytes).unwrap();
    format!("test_{:016x}", u64::from_be_bytes(bytes))
}

impl Drop for TestDb {
    fn drop(&mut self) {
        // An empty database is eight megabytes: a run of hundreds of tests would fill a small disk.
        let sockets = self.cluster.sockets();
        let mut drop = Command::new(bin_dir().join("dropdb"));
        drop.args(["--force", "-U", "windlass", "-h"]).arg(sockets).arg(&self.name);
        drop.stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap();
    }
}

/// Directory of the newest Postgres that Debian has installed, otherwise of the one on the path.
fn bin_dir() -> PathBuf {
    let mut found: Vec<(u32, PathBuf)> = fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            Some((path.file_name()?.to_str()?.parse().ok()?, path.join("bin")))
        })
        .filter(|(_, bin)| bin.join("initdb").exists())
        .collect();
    found.sort();
    if let Some((_, bin)) = found.pop() {
        return bin;
    }
    let output = Command::new("pg_config").arg("--bindir").output();
    let bin = output.ok().filter(|answer| answer.status.success()).expect(MISSING);
    let bin = PathBuf::from(String::from_utf8(bin.stdout).unwrap().trim());
    assert!(bin.join("initdb").exists(), "{MISSING}");
    bin
}

fn is_root() -> bool {
    command_number("id", &["-u"]) == Some(0)
}

fn command_number(program: &str, args: &[&str]) -> Option<u32> {
    let answer = Command::new(program).args(args).output().ok()?;
    String::from_utf8(answer.stdout).ok()?.trim().parse().ok()
}

/// Postgres refuses to run as root.
fn as_postgres(program: &Path) -> Command {
    assert!(program.exists(), "{MISSING}");
    if !is_root() {
        return Command::new(program);
    }
    let mut command = Command::new("setpriv");
    command.args(["--reuid=postgres", "--regid=postgres", "--init-groups", "--pdeathsig=QUIT", "--"]);
    command.arg(program).current_dir("/");
    command
}

fn chown_to_postgres(dir: &Path) {
    if is_root() {
        let owner = (command_number("id", &["-u", "postgres"]), command_number("id", &["-g", "postgres"]));
        assert!(owner.0.is_some(), "{MISSING}");
        std::os::unix::fs::chown(dir, owner.0, owner.1).unwrap();
    }
}
