//! Containers without an engine: their start, beside `docker run` and the bare OCI runtime; many at once; and what is left
//! after an agent was killed at random moments.

use std::{
    collections::BTreeSet,
    fs,
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::mpsc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use futures_util::future::try_join_all;
use ring::rand::SecureRandom as _;
use serde_json::json;
use windlass_api::agent::shim::ProcessIsolation;
use windlass_model::id::SubmissionId;
use windlass_testkit::{
    lab::registry::{ImageOptions, Registry},
    rng::Rng,
    temp_dir,
};

use super::{
    LOG_WAIT, TAIL_READ_BYTES,
    engine::BenchEngine,
    host::{ShimProcess, ShimTask},
    job, median,
};
use crate::results::BenchResults;

/// Network of the engine's containers.
const NETWORK: &str = "windlass-bench";
const REPEATS: usize = 30;
/// Size of the layer of an image that is pulled.
const PULL_BYTES: usize = 100 << 20;
/// Containers that are started at the same time.
const MANY: usize = 200;
const KILLS: usize = 20;
/// Containers that exist when an agent is killed.
const TASKS_PER_KILL: usize = 5;
const KILL_WITHIN_MS: u64 = 400;

/// `agent` is the `windlass-agent` binary.
pub async fn run(agent: &Path) -> Result<()> {
    let scratch = temp_dir("containers")?;
    let mut results = BenchResults::new("containers")?;
    let image = Image::create(scratch.path())?;
    measure_starts(agent, scratch.path(), &image, &mut results).await?;
    measure_many(agent, scratch.path(), &image, &mut results).await?;
    measure_kills(agent, scratch.path(), &image, &mut results).await?;
    results.save().map(drop)
}

/// An archive of one image with a static busybox, and its unpacked root.
struct Image {
    name: String,
    root: PathBuf,
    policy: String,
}

impl Image {
    fn create(scratch: &Path) -> Result<Self> {
        let root = scratch.join("rootfs");
        fs::create_dir_all(root.join("bin"))?;
        for dir in ["proc", "dev", "sys", "tmp", "etc"] {
            fs::create_dir_all(root.join(dir))?;
        }
        fs::copy("/usr/bin/busybox", root.join("bin/busybox"))
            .context("failed to copy busybox (package busybox-static)")?;
        for name in ["sh", "echo", "sleep"] {
            std::os::unix::fs::symlink("busybox", root.join("bin").join(name))?;
        }
        let dir = scratch.join("archive");
        fs::create_dir(&dir)?;
        check(Command::new("tar").arg("-C").arg(&root).arg("-cf").arg(dir.join("layer.tar")).arg("."))?;
        let digest = sha256(&fs::read(dir.join("layer.tar"))?);
        let config = json!({
            "architecture": if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" }, "os": "linux",
            "config": {"Env": ["PATH=/bin"]}, "rootfs": {"type": "layers", "diff_ids": [digest]},
        });
        fs::write(dir.join("config.json"), config.to_string())?;
        let manifest = json!([{"Config": "config.json", "RepoTags": ["bench:1"], "Layers": ["layer.tar"]}]);
        fs::write(dir.join("manifest.json"), manifest.to_string())?;
        let archive = scratch.join("docker-archive.tar");
        check(Command::new("tar").arg("-C").arg(&dir).arg("-cf").arg(&archive).args([
            "manifest.json",
            "config.json",
            "layer.tar",
        ]))?;
        let name = format!("docker-archive:{}", archive.display());
        Ok(Self { name, root, policy: format!("mounts: [{}]\n", scratch.display()) })
    }
}

fn check(command: &mut Command) -> Result<()> {
    ensure!(command.status()?.success(), "{command:?} failed");
    Ok(())
}

fn start_shim(agent: &Path, home: &Path, image: &Image) -> Result<ShimProcess> {
    ShimProcess::start_with_policy(
        agent,
        home,
        &["--runtime", "any-oci", "--processes", "own"],
        &image.policy,
    )
}

/// The OCI runtime by itself, with a separate configuration.
struct BareRuntime {
    program: String,
    bundle: PathBuf,
}

impl BareRuntime {
    fn create(scratch: &Path, image: &Image) -> Result<Self> {
        // The one that the agent uses: `crun` refuses hosts that have control groups of both versions.
        let has_v1 = fs::read_to_string("/proc/self/mountinfo")?.contains(" - cgroup ");
        let program = if has_v1 { "runc" } else { "crun" }.to_owned();
        let bundle = scratch.join("bundle");
        fs::create_dir(&bundle)?;
        check(Command::new(&program).arg("spec").current_dir(&bundle))?;
        let path = bundle.join("config.json");
        let mut config: serde_json::Value = serde_json::from_slice(&fs::read(&path)?)?;
        config["process"]["terminal"] = json!(false);
        config["process"]["args"] = json!(["/bin/echo", "hello"]);
        config["root"] = json!({"path": image.root});
        fs::write(path, config.to_string())?;
        Ok(Self { program, bundle })
    }

    fn run(&self, number: usize) -> Result<Duration> {
        let started = Instant::now();
        let mut child = Command::new(&self.program)
            .args(["run", "--bundle"])
            .arg(&self.bundle)
            .arg(format!("bench-{}-{number}", std::process::id()))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().context("no output")?).read_line(&mut line)?;
        let taken = started.elapsed();
        ensure!(child.wait()?.success() && line == "hello\n", "{} failed", self.program);
        Ok(taken)
    }
}

/// Registry in a thread, beside programs that are waited for.
fn start_registry() -> Result<Registry> {
    let (send, receive) = mpsc::channel();
    let serve = move || -> Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            send.send(Registry::start().await).ok().context("nothing waits for the registry")?;
            std::future::pending::<()>().await;
            Ok(())
        })
    };
    std::thread::Builder::new().name("registry".to_owned()).spawn(serve)?;
    receive.recv().context("the registry did not start")
}

fn sha256(bytes: &[u8]) -> String {
    let digest = ring::digest::digest(&ring::digest::SHA256, bytes);
    let digest: String = digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{digest}")
}

/// Puts the image into the registry, with a layer that does not compress, and returns its name there.
fn publish_image(registry: &Registry, scratch: &Path) -> Result<String> {
    let dir = scratch.join("large");
    fs::create_dir(&dir)?;
    let mut data = vec![0; PULL_BYTES];
    ring::rand::SystemRandom::new().fill(&mut data).ok().context("failed to generate random bytes")?;
    fs::write(dir.join("data"), data)?;
    let archive = scratch.join("large.tar");
    check(Command::new("tar").arg("-C").arg(&dir).arg("-cf").arg(&archive).arg("data"))?;
    let layers = [scratch.join("archive/layer.tar"), archive].map(fs::read);
    let layers = layers.into_iter().map(|layer| {
        let layer = layer?;
        let digest = sha256(&layer);
        Ok::<_, std::io::Error>((layer, digest))
    });
    let layers = layers.collect::<std::io::Result<Vec<_>>>()?;
    let options = ImageOptions { config: r#"{"Env": ["PATH=/bin"]}"#, ..ImageOptions::default() };
    Ok(registry.put_layers("bench", "1", layers, options).0)
}

/// Measures the first line of a container, interleaved with the alternatives. Without an engine, those of one are left out.
async fn measure_starts(
    agent: &Path,
    scratch: &Path,
    image: &Image,
    results: &mut BenchResults,
) -> Result<()> {
    let engine = BenchEngine::from_environment(scratch);
    if let Err(error) = &engine {
        results.say(&format!("no comparison with an engine: {error:#}"))?;
    }
    let engine = engine.ok();
    let bare = BareRuntime::create(scratch, image)?;
    let host = start_shim(agent, &scratch.join("starts"), image)?;
    let registry = start_registry()?;
    let name = publish_image(&registry, scratch)?;
    let first = first_line(&host, &name, "host").await?;
    results.figure("first_ms", "first start, pull of 100 MiB", first.as_secs_f64() * 1e3, "ms")?;
    if let Some(engine) = &engine {
        engine.create_network(NETWORK)?;
        let (first, _) = engine.run_image(&name, &["host"])?;
        results.figure(
            "docker_first_ms",
            "first docker run, the same pull",
            first.as_secs_f64() * 1e3,
            "ms",
        )?;
    }
    let (mut raw, mut docker, mut bridged_docker) = (Vec::new(), Vec::new(), Vec::new());
    let (mut on_host, mut on_bridge, mut plain) = (Vec::new(), Vec::new(), Vec::new());
    for number in 0..=REPEATS {
        let mut samples = vec![
            (&mut raw, bare.run(number)?),
            (&mut on_host, first_line(&host, &name, "host").await?),
            (&mut on_bridge, first_line(&host, &name, "bridge").await?),
            (&mut plain, first_line(&host, "none", "host").await?),
        ];
        if let Some(engine) = &engine {
            samples.push((&mut docker, engine.run_image(&name, &["host"])?.0));
            samples.push((&mut bridged_docker, engine.run_image(&name, &[NETWORK])?.0));
        }
        for (kept, taken) in samples {
            // The first repetition warms the caches.
            if number > 0 {
                kept.push(taken);
            }
        }
    }
    results.times("bare", &format!("{} run, to first line", bare.program), &mut raw)?;
    results.times("host", "container, host network, to first line", &mut on_host)?;
    results.times("bridge", "container, own network, to first line", &mut on_bridge)?;
    results.times("process", "plain process, to first line", &mut plain)?;
    if let Some(engine) = &engine {
        engine.remove_image(&name)?;
        results.times("docker", "docker run, host network, to first line", &mut docker)?;
        results.times("docker_bridge", "docker run, own network, to first line", &mut bridged_docker)?;
    }
    let more = (median(&mut on_host).as_secs_f64() - median(&mut raw).as_secs_f64()) * 1e3;
    results.figure("over_bare_ms", &format!("… container over bare {}", bare.program), more, "ms")?;
    // The shortest of each: what other work on the machine adds least to.
    let least = |taken: &[Duration]| taken.first().copied().unwrap_or_default().as_secs_f64() * 1e3;
    let more = least(&on_host) - least(&raw);
    results.figure("least_over_bare_ms", "… the shortest of each", more, "ms")
}

async fn first_line(host: &ShimProcess, image: &str, network: &str) -> Result<Duration> {
    let shim = host.connect().await?;
    let start = Instant::now();
    let task = host.submit_on(&shim, image, ProcessIsolation::Own, network).await?;
    task.submit_job(&job(&["/bin/echo", "hello"])?).await?;
    task.run().await?;
    let part = shim.log(task.id, "job", 0, TAIL_READ_BYTES, LOG_WAIT).await?;
    let taken = start.elapsed();
    ensure!(part.bytes == "hello\n", "unexpected output of the job: {:?}", part.bytes);
    task.finish().await?;
    Ok(taken)
}

/// Measures the start of many containers that are submitted at once.
async fn measure_many(agent: &Path, scratch: &Path, image: &Image, results: &mut BenchResults) -> Result<()> {
    for network in ["host", "bridge"] {
        let home = scratch.join(format!("many-{network}"));
        let host = start_shim(agent, &home, image)?;
        first_line(&host, &image.name, network).await?;
        let started = Instant::now();
        let one = async || -> Result<ShimTask> {
            let shim = host.connect().await?;
            let task = host.submit_on(&shim, &image.name, ProcessIsolation::Own, network).await?;
            task.wait_until_running().await?;
            Ok(task)
        };
        let tasks = try_join_all((0..MANY).map(|_| one())).await?;
        let running = started.elapsed();
        let ids: Vec<SubmissionId> = tasks.iter().map(|task| task.id).collect();
        try_join_all(tasks.into_iter().map(ShimTask::abort)).await?;
        let ended = started.elapsed() - running;
        check_clean(&home, &ids)?;
        results.about(network);
        let what = format!("{MANY} containers at once, {network} network, to run");
        results.figure("many_s", &what, running.as_secs_f64(), "s")?;
        results.figure("many_end_s", "– until all have ended and are removed", ended.as_secs_f64(), "s")?;
        results.figure("many_resident_mb", "– memory of the agent", host.resident_kb()? / 1024.0, "MB")?;
        results.about("");
    }
    Ok(())
}

/// Kills the agent at random moments while it starts containers, and looks for leftovers after they were removed.
async fn measure_kills(
    agent: &Path,
    scratch: &Path,
    image: &Image,
    results: &mut BenchResults,
) -> Result<()> {
    let home = scratch.join("kills");
    let mut host = start_shim(agent, &home, image)?;
    let mut rng = Rng::new(28);
    let mut ids = Vec::new();
    for _ in 0..KILLS {
        let shim = host.connect().await?;
        for at in 0..TASKS_PER_KILL {
            let network = if at % 2 == 0 { "host" } else { "bridge" };
            ids.push(host.submit_on(&shim, &image.name, ProcessIsolation::Own, network).await?.id);
        }
        tokio::time::sleep(Duration::from_millis(rng.below(KILL_WITHIN_MS))).await;
        host.restart_after_kill()?;
        host.remove_all()?;
    }
    check_clean(&home, &ids)?;
    let what = format!("leftovers of {} containers, agent killed {KILLS} times", ids.len());
    results.figure("leftovers", &what, 0.0, "")
}

/// Fails if anything of the tasks is left on this host: processes, control groups, mounts, interfaces, directories.
fn check_clean(home: &Path, tasks: &[SubmissionId]) -> Result<()> {
    let started = Instant::now();
    loop {
        let left = leftovers(home, tasks)?;
        if left.is_empty() {
            return Ok(());
        }
        if started.elapsed() > LOG_WAIT {
            bail!("left on this host: {left:?}");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn leftovers(home: &Path, tasks: &[SubmissionId]) -> Result<BTreeSet<String>> {
    let mut left = BTreeSet::new();
    let names: BTreeSet<String> = tasks.iter().map(ToString::to_string).collect();
    let directories = names.iter().map(|name| home.join("tasks").join(name)).filter(|path| path.exists());
    let unfinished = fs::read_dir(home.join("oci/tmp"))?.flatten().map(|entry| entry.path());
    left.extend(directories.chain(unfinished).map(|path| path.display().to_string()));
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let points = mounts.lines().filter_map(|line| line.split(' ').nth(4));
    left.extend(points.filter(|at| names.iter().any(|name| at.contains(name))).map(str::to_owned));
    for entry in fs::read_dir("/proc")?.flatten() {
        let environment = fs::read(entry.path().join("environ")).unwrap_or_default();
        let mut variables = environment.split(|byte| *byte == 0).map(String::from_utf8_lossy);
        let mark = variables.find_map(|one| one.strip_prefix("WINDLASS_TASK_ID=").map(str::to_owned));
        left.extend(mark.filter(|id| names.contains(id)).map(|_| entry.path().display().to_string()));
    }
    for line in mounts.lines().filter(|line| line.contains(" - cgroup")) {
        let Some(point) = line.split(' ').nth(4) else { continue };
        for home in fs::read_dir(Path::new(point).join("windlass")).into_iter().flatten().flatten() {
            for group in fs::read_dir(home.path()).into_iter().flatten().flatten() {
                if group.file_name().to_str().is_some_and(|name| names.contains(name)) {
                    left.insert(group.path().display().to_string());
                }
            }
        }
    }
    for entry in fs::read_dir("/sys/class/net")?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with("wl-") {
            left.insert(name);
        }
    }
    Ok(left)
}
