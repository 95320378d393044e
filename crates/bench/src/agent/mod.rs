//! Benchmarks of the real agent: start time, task start time, output throughput and resource usage.

pub mod containers;
pub(super) mod engine;
mod host;

use std::{
    io::Write,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use windlass_api::agent::{client::ShimClient, runner::SubmitBody, shim::ProcessIsolation};

use engine::BenchEngine;
use host::{ShimProcess, ShimTask};
use windlass_testkit::{rng::Rng, temp_dir};

/// Number of repetitions of short measurements.
const REPEATS: usize = 20;
/// Output of a job, for measuring the throughput.
const OUTPUT_BYTES: usize = 512 << 20;
const TAILERS: usize = 2;
const SIMULATED_HOSTS: usize = 2_000;
/// Read size of a tailer.
const TAIL_READ_BYTES: usize = 4 << 20;
const LOG_WAIT: Duration = Duration::from_secs(20);
/// Time after which a started shim has released unused memory.
const QUIET_TIME: Duration = Duration::from_millis(500);

/// `agent` is the `windlass-agent` binary.
pub async fn run(agent: &Path) -> Result<()> {
    let scratch = temp_dir("agent")?;
    let mut out = std::io::stdout();
    measure_starts(agent, scratch.path(), &mut out).await?;
    measure_tasks(agent, scratch.path(), &mut out).await?;
    measure_output(agent, scratch.path(), &mut out).await?;
    measure_simulated_hosts(agent, scratch.path(), &mut out).await
}

/// Measures the time from exec to the first response.
async fn measure_starts(agent: &Path, scratch: &Path, out: &mut impl Write) -> Result<()> {
    let mut taken = Vec::new();
    for time in 0..REPEATS {
        let host =
            ShimProcess::start(agent, &scratch.join(format!("start-{time}")), &["--runtime", "process"])?;
        taken.push(host.ready);
        if time + 1 == REPEATS {
            tokio::time::sleep(QUIET_TIME).await;
            writeln!(out, "{:<46} {:>9.1} MB", "shim, resident memory, idle", host.resident_kb()? / 1024.0)?;
        }
    }
    print_durations(out, "shim, exec to first response", &mut taken)
}

/// Measures the time from the submission of a task to its first line, interleaved with `docker run` of the same image.
async fn measure_tasks(agent: &Path, scratch: &Path, out: &mut impl Write) -> Result<()> {
    let engine = BenchEngine::from_environment(scratch)?;
    let socket = engine.socket.to_str().context("the path is not UTF-8")?.to_owned();
    let docker = ShimProcess::start(
        agent,
        &scratch.join("docker"),
        &["--runtime", "docker", "--docker-socket", &socket],
    )?;
    let process =
        ShimProcess::start(agent, &scratch.join("process"), &["--runtime", "process", "--processes", "own"])?;
    let (mut lines, mut exits) = (Vec::new(), Vec::new());
    let (mut answers, mut ours) = (Vec::new(), Vec::new());
    let (mut plain_answers, mut plain) = (Vec::new(), Vec::new());
    let (mut confined_answers, mut confined) = (Vec::new(), Vec::new());
    // The first repetition warms the caches.
    for time in 0..=REPEATS {
        let (line, exit) = engine.run(&["host"])?;
        let within = ProcessIsolation::Confined;
        let container = measure_first_line(&docker, &engine.image, within)
            .await
            .context("failed to run a task in a container")?;
        let alone = measure_first_line(&process, "none", ProcessIsolation::Own)
            .await
            .context("failed to run a task as a process")?;
        let kept_in = measure_first_line(&process, "none", within)
            .await
            .context("failed to run a task as a confined process")?;
        if time > 0 {
            lines.push(line);
            exits.push(exit);
            answers.push(container.0);
            ours.push(container.1);
            plain_answers.push(alone.0);
            plain.push(alone.1);
            confined_answers.push(kept_in.0);
            confined.push(kept_in.1);
        }
    }
    let (theirs, mine) = (median(&mut lines), median(&mut ours));
    print_durations(out, "docker run, host network, to first line", &mut lines)?;
    print_durations(out, "docker run, host network, to exit", &mut exits)?;
    print_durations(out, "docker task, submit to runner's response", &mut answers)?;
    print_durations(out, "docker task, submit to the job's first line", &mut ours)?;
    let more = (mine.as_secs_f64() - theirs.as_secs_f64()) * 1e3;
    let ratio = mine.as_secs_f64() / theirs.as_secs_f64();
    writeln!(out, "{:<46} {more:>+9.1} ms   {ratio:.2} times", "… overhead over docker run to first line")?;
    print_durations(out, "process task, submit to runner's response", &mut plain_answers)?;
    print_durations(out, "process task, submit to the job's first line", &mut plain)?;
    print_durations(out, "confined task, submit to runner's response", &mut confined_answers)?;
    print_durations(out, "confined task, submit to the job's first line", &mut confined)
}

/// Starts a task whose job writes one line. Returns the times until its runner responded and until the line arrived.
async fn measure_first_line(
    host: &ShimProcess,
    image: &str,
    isolation: ProcessIsolation,
) -> Result<(Duration, Duration)> {
    let shim = host.connect().await?;
    let start = Instant::now();
    let task = host.submit(&shim, image, isolation).await?;
    task.submit_job(&job(&["echo", "hello"])?).await?;
    let answered = start.elapsed();
    task.run().await?;
    let part = shim.log(task.id, "job", 0, TAIL_READ_BYTES, LOG_WAIT).await?;
    let line = start.elapsed();
    ensure!(part.bytes == "hello\n", "unexpected output of the job: {:?}", part.bytes);
    task.finish().await?;
    Ok((answered, line))
}

/// Measures the output throughput, alone and with concurrent readers.
async fn measure_output(agent: &Path, scratch: &Path, out: &mut impl Write) -> Result<()> {
    let noise = scratch.join("noise");
    std::fs::write(&noise, Rng::new(1).bytes(OUTPUT_BYTES))?;
    let host =
        ShimProcess::start(agent, &scratch.join("output"), &["--runtime", "process", "--processes", "own"])?;
    let file = noise.to_str().context("the path is not UTF-8")?;
    for tailers in [0, TAILERS] {
        let shim = host.connect().await?;
        let task = host.submit(&shim, "none", ProcessIsolation::Own).await?;
        task.submit_job(&job(&["cat", file])?).await?;
        let runner = host.runner(task.id)?;
        let started = Instant::now();
        task.run().await?;
        let mut reading = tokio::task::JoinSet::new();
        for _ in 0..tailers {
            reading.spawn(tail(host.connect().await?, task.id));
        }
        let kept = wait_until_stored(&task).await?.duration_since(started);
        while let Some(read) = reading.join_next().await {
            ensure!(read?? == OUTPUT_BYTES as u64, "a tailer missed output");
        }
        let read = started.elapsed();
        let peak = runner.peak_kb()? / 1024.0;
        task.finish().await?;
        let rate = |taken: Duration| OUTPUT_BYTES as f64 / 1e6 / taken.as_secs_f64();
        let what = format!("output of one job, {tailers} tailers");
        write!(out, "{what:<46} {:>9.0} MB/s stored", rate(kept))?;
        if tailers > 0 {
            write!(out, "   {:.0} MB/s read by each", rate(read))?;
        }
        writeln!(out, "   runner's peak memory {peak:.1} MB")?;
    }
    Ok(())
}

/// Waits until the job's output is complete.
async fn wait_until_stored(task: &ShimTask) -> Result<Instant> {
    loop {
        // Reads from the end: the response only states that the log is complete.
        let part = task.shim.log(task.id, "job", OUTPUT_BYTES as u64, 0, LOG_WAIT).await?;
        if part.is_complete {
            ensure!(part.end == OUTPUT_BYTES as u64, "only {} bytes were stored", part.end);
            return Ok(Instant::now());
        }
    }
}

async fn tail(shim: ShimClient, id: windlass_model::id::SubmissionId) -> Result<u64> {
    let mut offset = 0;
    loop {
        let part = shim.log(id, "job", offset, TAIL_READ_BYTES, LOG_WAIT).await?;
        offset += part.bytes.len() as u64;
        if part.is_complete && offset >= part.end {
            return Ok(offset);
        }
    }
}

/// Measures many hosts in one process.
async fn measure_simulated_hosts(agent: &Path, scratch: &Path, out: &mut impl Write) -> Result<()> {
    let one = ShimProcess::start(agent, &scratch.join("simulated-one"), &["--runtime", "simulated"])?;
    tokio::time::sleep(QUIET_TIME).await;
    let alone = one.resident_kb()?;
    drop(one);
    let count = SIMULATED_HOSTS.to_string();
    let host = ShimProcess::start(
        agent,
        &scratch.join("simulated"),
        &["--runtime", "simulated", "--hosts", &count],
    )?;
    tokio::time::sleep(QUIET_TIME).await;
    let idle = host.resident_kb()?;
    for number in 1..=SIMULATED_HOSTS {
        let shim = host.connect_to(number).await?;
        host.submit(&shim, "none", ProcessIsolation::Own).await?;
    }
    let busy = host.resident_kb()?;
    let each = |kb: f64| (kb - alone) / SIMULATED_HOSTS as f64;
    writeln!(
        out,
        "{:<46} {:>9.0} ms to respond   {:.1} kB each   {:.1} kB each with a task",
        format!("{SIMULATED_HOSTS} simulated hosts in one process"),
        host.ready.as_secs_f64() * 1e3,
        each(idle),
        each(busy),
    )?;
    Ok(())
}

fn job(commands: &[&str]) -> Result<SubmitBody> {
    let job =
        json!({"run": {"id": "bench"}, "job_spec": {"commands": commands, "user": {"username": "root"}}});
    Ok(serde_json::from_value(job)?)
}

fn median(taken: &mut [Duration]) -> Duration {
    taken.sort();
    taken.get(taken.len() / 2).copied().unwrap_or_default()
}

fn print_durations(out: &mut impl Write, what: &str, taken: &mut [Duration]) -> Result<()> {
    let ms = |taken: Duration| taken.as_secs_f64() * 1e3;
    let middle = ms(median(taken));
    let (Some(first), Some(last)) = (taken.first(), taken.last()) else { return Ok(()) };
    writeln!(
        out,
        "{what:<46} {middle:>9.1} ms   ({:.1} to {:.1}, {} samples)",
        ms(*first),
        ms(*last),
        taken.len()
    )?;
    Ok(())
}
