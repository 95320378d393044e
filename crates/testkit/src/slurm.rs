//! A real Slurm cluster on one machine: a controller and any number of nodes, all removed by its guard.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    fmt::Write as _,
    fs,
    io::Read as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};

use crate::{
    TempDir,
    wait::{eventually, eventually_ok, is_listening},
    without_engine,
};

const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Declared size of a node, which may exceed the machine.
#[derive(Clone, Copy, Debug)]
pub struct NodeSize {
    pub cpus: u32,
    pub memory_mib: u32,
    pub gpus: u32,
    /// Type of its GPUs as the cluster names it, such as `h100`.
    pub gpu_type: Option<&'static str>,
}

pub struct SlurmCluster {
    dir: TempDir,
    munged: Option<Child>,
    controller: Option<Child>,
    rest: Option<Child>,
    nodes: Vec<(String, Option<Child>)>,
    /// The nodes have neither Docker nor Podman nor Apptainer.
    without_engine: bool,
}

impl SlurmCluster {
    /// Starts a cluster and waits until every node is idle.
    ///
    /// # Panics
    /// If Slurm is not installed or does not start.
    #[must_use]
    pub fn start(sizes: &[NodeSize]) -> Self {
        Self::start_with(sizes, false)
    }

    /// Starts a cluster on whose nodes no container engine is installed.
    ///
    /// # Panics
    /// If Slurm is not installed or does not start.
    #[must_use]
    pub fn start_without_engine(sizes: &[NodeSize]) -> Self {
        Self::start_with(sizes, true)
    }

    #[expect(clippy::expect_used, reason = "for tests: what cannot start says so")]
    fn start_with(sizes: &[NodeSize], without_engine: bool) -> Self {
        let mut random = [0_u8; 128];
        getrandom::fill(&mut random).expect("random bytes");
        let temp = crate::temp_dir("slurm").expect("make the cluster's folder");
        let dir = temp.path();
        for below in ["munge", "state", "log", "run"] {
            fs::create_dir_all(dir.join(below)).expect("make the cluster's folders");
        }
        for node in 1..=sizes.len() {
            fs::create_dir_all(dir.join(format!("spool/n{node}"))).expect("make a node's folder");
        }
        write_private(&dir.join("munge/key"), &random);
        let mut cluster =
            Self { dir: temp, munged: None, controller: None, rest: None, nodes: Vec::new(), without_engine };
        cluster.configure(sizes);
        cluster.at_the_end("true");
        cluster.start_munged();
        cluster.start_controller();
        for node in 1..=sizes.len() {
            cluster.nodes.push((format!("n{node}"), None));
            cluster.start_node(node - 1);
        }
        cluster.wait_until_idle();
        cluster
    }

    /// Value for `SLURM_CONF`.
    #[must_use]
    pub fn config(&self) -> PathBuf {
        self.dir().join("slurm.conf")
    }

    #[must_use]
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Runs a Slurm program and returns its output.
    #[must_use]
    #[expect(clippy::expect_used, reason = "for tests: what cannot start says so")]
    pub fn say(&self, program: &str, args: &[&str]) -> String {
        let output = self.program(program).args(args).output().expect("start one of Slurm's programs");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Sets the shell command that the controller runs when a job ends.
    #[expect(clippy::expect_used, reason = "for tests: what cannot be written says so")]
    pub fn at_the_end(&self, command: &str) {
        use std::os::unix::fs::PermissionsExt as _;
        let (script, new) = (self.dir().join("ended"), self.dir().join("ended.new"));
        fs::write(&new, format!("#!/bin/sh\n{command}\n")).expect("write what is done at the end of a job");
        fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).expect("make it a program");
        // Replaced atomically: the controller may be about to start it.
        fs::rename(new, script).expect("put it in place");
    }

    /// Starts a `slurmrestd`, and returns its socket.
    ///
    /// # Panics
    /// If it is not installed or does not start.
    #[expect(clippy::expect_used, reason = "for tests: what cannot start says so")]
    pub fn start_rest(&mut self) -> PathBuf {
        let socket = self.dir().join("rest.sock");
        let mut command = self.program("slurmrestd");
        // It refuses to serve root, which is the user of these tests.
        command.env("SLURMRESTD_SECURITY", "disable_user_check").arg("-f").arg(self.config());
        command.args(["-a", "rest_auth/local", "-s", "openapi/v0.0.38"]);
        command.arg(format!("unix:{}", socket.display()));
        self.rest = Some(command.spawn().expect("start slurmrestd: is its package installed?"));
        eventually_ok("slurmrestd listens", || if is_listening(&socket) { Ok(()) } else { Err(self.logs()) });
        socket
    }

    /// Kills the controller, as a power cut would.
    pub fn kill_controller(&mut self) {
        terminate(self.controller.take(), Signal::KILL);
    }

    #[expect(clippy::expect_used, reason = "for tests: what cannot start says so")]
    pub fn start_controller(&mut self) {
        let mut command = self.program("slurmctld");
        command.arg("-D").arg("-f").arg(self.config());
        self.controller = Some(command.spawn().expect("start slurmctld"));
    }

    /// Stops the controller as an administrator would: with its state saved.
    pub fn stop_controller(&mut self) {
        terminate(self.controller.take(), Signal::TERM);
    }

    /// Freezes or resumes the controller.
    pub fn freeze_controller(&self, frozen: bool) {
        if let Some(child) = &self.controller {
            signal(child, if frozen { Signal::STOP } else { Signal::CONT });
        }
    }

    pub fn kill_node(&mut self, index: usize) {
        terminate(self.nodes[index].1.take(), Signal::KILL);
    }

    #[expect(clippy::expect_used, reason = "for tests: what cannot start says so")]
    pub fn start_node(&mut self, index: usize) {
        let name = &self.nodes[index].0;
        let mut command = self.program("slurmd");
        if self.without_engine {
            let words = without_engine::words(&self.dir().join("spool").join(name), Path::new("slurmd"));
            command = self.command(&words[0]);
            command.args(&words[1..]).env_remove("DOCKER_HOST").stdout(Stdio::null());
        }
        command.args(["-D", "-N", name, "-f"]).arg(self.config());
        self.nodes[index].1 = Some(command.spawn().expect("start slurmd"));
    }

    /// Waits until all nodes have reported and no job runs.
    ///
    /// # Panics
    /// If that takes too long.
    pub fn wait_until_idle(&self) {
        eventually_ok("all nodes are idle", || {
            // A node is listed once for each of its partitions.
            let states = self.say("sinfo", &["-h", "-N", "-o", "%N %T"]);
            let idle: BTreeSet<&str> = states.lines().filter(|line| line.ends_with(" idle")).collect();
            if idle.len() >= self.nodes.len() { Ok(()) } else { Err(format!("{states:?}\n{}", self.logs())) }
        });
    }

    fn logs(&self) -> String {
        let mut text = String::new();
        for entry in fs::read_dir(self.dir().join("log")).into_iter().flatten().flatten() {
            let log = fs::read_to_string(entry.path()).unwrap_or_default();
            let last: Vec<&str> = log.lines().rev().take(10).collect();
            let _ = writeln!(text, "{}: {last:#?}", entry.path().display());
        }
        text
    }

    fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        command.env("SLURM_CONF", self.config()).stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::null());
        command
    }

    fn program(&self, program: &str) -> Command {
        let mut command = self.command(program);
        if matches!(program, "slurmctld" | "slurmd" | "slurmrestd") {
            command.stdout(Stdio::null());
        }
        command
    }

    #[expect(clippy::expect_used, reason = "for tests: what cannot start says so")]
    fn start_munged(&mut self) {
        let at = self.dir().join("munge");
        let file = |name: &str| at.join(name).display().to_string();
        let mut command = Command::new("munged");
        command.args(["--foreground", "--force"]);
        command.arg(format!("--key-file={}", file("key")));
        command.arg(format!("--socket={}", file("munge.sock")));
        command.arg(format!("--pid-file={}", file("pid")));
        command.arg(format!("--log-file={}", file("log")));
        command.arg(format!("--seed-file={}", file("seed")));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        self.munged = Some(command.spawn().expect("start munged: is the package `munge` installed?"));
        eventually("munged listens", || is_listening(&at.join("munge.sock")));
    }

    #[expect(clippy::expect_used, reason = "for tests: what cannot start says so")]
    fn configure(&self, sizes: &[NodeSize]) {
        let dir = self.dir().display();
        let host = hostname();
        let ports: Vec<u16> = (0..=sizes.len()).map(|_| crate::ports::reserve_free_port()).collect();
        let mut text = format!(
            "ClusterName=t{port}\nSlurmctldHost={host}(127.0.0.1)\nSlurmUser=root\nSlurmdUser=root\n\
             AuthType=auth/munge\nAuthInfo=socket={dir}/munge/munge.sock\nCredType=cred/munge\n\
             SlurmctldPort={port}\nSlurmctldPidFile={dir}/run/ctld.pid\nSlurmctldLogFile={dir}/log/slurmctld.log\n\
             StateSaveLocation={dir}/state\nSlurmdSpoolDir={dir}/spool/%n\nSlurmdPidFile={dir}/run/slurmd.%n.pid\n\
             SlurmdLogFile={dir}/log/slurmd.%n.log\nSlurmdParameters=config_overrides\n\
             ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nSelectType=select/cons_tres\n\
             SelectTypeParameters=CR_Core_Memory\nSchedulerType=sched/backfill\n\
             SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=2,sched_min_interval=0\n\
             PriorityType=priority/multifactor\nPriorityWeightPartition=2000000000\nPriorityCalcPeriod=1\n\
             EnforcePartLimits=ALL\nJobCompType=jobcomp/script\nJobCompLoc={dir}/ended\nJobAcctGatherType=jobacct_gather/none\n\
             AccountingStorageType=accounting_storage/none\nMpiDefault=none\nReturnToService=2\nMinJobAge=60\n\
             KillWait=5\nSlurmctldTimeout=10\nSlurmdTimeout=10\nInactiveLimit=0\nMessageTimeout=10\n\
             MailProg=/bin/true\nGresTypes=gpu\n",
            port = ports[0],
        );
        let mut gres = String::new();
        // One partition with all nodes, and one for each node, for jobs that must run on a certain node.
        let mut partitions =
            "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityJobFactor=65533\n"
                .to_owned();
        for (index, size) in sizes.iter().enumerate() {
            let name = format!("n{}", index + 1);
            let typed = size.gpu_type.map(|name| format!("{name}:")).unwrap_or_default();
            let gpus = if size.gpus > 0 { format!("Gres=gpu:{typed}{} ", size.gpus) } else { String::new() };
            let _ = writeln!(
                text,
                "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={} CPUs={} RealMemory={} \
                 TmpDisk=10000 Feature=any,on-{name} {gpus}State=UNKNOWN",
                ports[index + 1],
                size.cpus,
                size.memory_mib
            );
            for gpu in 0..size.gpus {
                fs::write(self.dir().join(format!("{name}-gpu{gpu}")), "").expect("make a pretended GPU");
            }
            let _ = writeln!(
                partitions,
                "PartitionName=only-{name} Nodes={name} MaxTime=INFINITE State=UP PriorityJobFactor=65533"
            );
            if size.gpus > 0 {
                let typed = size.gpu_type.map(|name| format!("Type={name} ")).unwrap_or_default();
                let last = size.gpus - 1;
                let _ = writeln!(gres, "NodeName={name} Name=gpu {typed}File={dir}/{name}-gpu[0-{last}]");
            }
        }
        text.push_str(&partitions);
        fs::write(self.config(), text).expect("write slurm.conf");
        fs::write(self.dir().join("gres.conf"), gres).expect("write gres.conf");
    }
}

impl Drop for SlurmCluster {
    /// Munge stops last: a job that ends without it blocks its node.
    fn drop(&mut self) {
        self.freeze_controller(false);
        if self.controller.is_some() {
            let _ = self.say("scancel", &["-u", "root"]);
            let since = Instant::now();
            while !self.say("squeue", &["-h"]).is_empty() && since.elapsed() < Duration::from_secs(15) {
                std::thread::sleep(POLL_INTERVAL);
            }
        }
        terminate(self.rest.take(), Signal::TERM);
        for (_, child) in &mut self.nodes {
            terminate(child.take(), Signal::TERM);
        }
        terminate(self.controller.take(), Signal::TERM);
        terminate(self.munged.take(), Signal::TERM);
    }
}

fn signal(child: &Child, signal: Signal) {
    if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, signal);
    }
}

/// Sends a signal, and after a while SIGKILL.
fn terminate(child: Option<Child>, how: Signal) {
    let Some(mut child) = child else { return };
    signal(&child, how);
    let since = Instant::now();
    while matches!(child.try_wait(), Ok(None)) {
        if since.elapsed() > Duration::from_secs(10) {
            let _ = child.kill();
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

#[expect(clippy::expect_used, reason = "for tests: what cannot start says so")]
fn write_private(path: &Path, bytes: &[u8]) {
    use std::{io::Write as _, os::unix::fs::OpenOptionsExt as _};
    let mut file =
        fs::OpenOptions::new().write(true).create_new(true).mode(0o400).open(path).expect("make a key");
    file.write_all(bytes).expect("write a key");
}

#[expect(clippy::expect_used, reason = "for tests: what cannot start says so")]
fn hostname() -> String {
    let mut name = String::new();
    let mut file = fs::File::open("/proc/sys/kernel/hostname").expect("this machine's name");
    file.read_to_string(&mut name).expect("this machine's name");
    name.trim().split('.').next().unwrap_or_default().to_owned()
}
