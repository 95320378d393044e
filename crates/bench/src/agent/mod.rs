//! The real agent: how fast it starts, how fast tasks start under it, how fast it keeps output, and what it takes.

pub(super) mod engine;
mod host;

use std::{
    io::Write,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use windlass_api::agent::{client::Shim, runner::Submit, shim::ProcessIsolation};

use engine::Engine;
use host::{Host, Task};
use windlass_testkit::{rng::Rng, temp_dir};

/// How often short things are repeated.
const TIMES: usize = 20;
/// What a job prints to measure how fast it is kept.
const OUTPUT: usize = 512 << 20;
const TAILERS: usize = 2;
const HOLLOW_HOSTS: usize = 2_000;
/// How much of the output a tailer asks for at once.
const READ: usize = 4 << 20;
const WAIT: Duration = Duration::from_secs(20);
/// A shim that has just started still gives memory back.
const SETTLE: Duration = Duration::from_millis(500);

/// `agent` is the `windlass-agent` binary.
pub async fn run(agent: &Path) -> Result<()> {
    let scratch = temp_dir("agent")?;
    let mut out = std::io::stdout();
    starts(agent, scratch.path(), &mut out).await?;
    tasks(agent, scratch.path(), &mut out).await?;
    output(agent, scratch.path(), &mut out).await?;
    hollow(agent, scratch.path(), &mut out).await
}

/// From exec to the first answer.
async fn starts(agent: &Path, scratch: &Path, out: &mut impl Write) -> Result<()> {
    let mut taken = Vec::new();
    for time in 0..TIMES {
        let host = Host::start(agent, &scratch.join(format!("start-{time}")), &["--runtime", "process"])?;
        taken.push(host.ready);
        if time + 1 == TIMES {
            tokio::time::sleep(SETTLE).await;
            writeln!(out, "{:<46} {:>9.1} MB", "shim, resident, idle", host.resident_kb()? / 1024.0)?;
        }
    }
    show(out, "shim, exec to first answer", &mut taken)
}

/// From the submission of a task to its first line, beside `docker run` of the same image in the same minute.
async fn tasks(agent: &Path, scratch: &Path, out: &mut impl Write) -> Result<()> {
    let engine = Engine::from_environment(scratch)?;
    let socket = engine.socket.to_str().context("a path that is text")?.to_owned();
    let docker =
        Host::start(agent, &scratch.join("docker"), &["--runtime", "docker", "--docker-socket", &socket])?;
    let process =
        Host::start(agent, &scratch.join("process"), &["--runtime", "process", "--processes", "own"])?;
    let (mut lines, mut exits) = (Vec::new(), Vec::new());
    let (mut answers, mut ours) = (Vec::new(), Vec::new());
    let (mut plain_answers, mut plain) = (Vec::new(), Vec::new());
    let (mut confined_answers, mut confined) = (Vec::new(), Vec::new());
    // The first of each is for the caches.
    for time in 0..=TIMES {
        let (line, exit) = engine.run(&["host"])?;
        let within = ProcessIsolation::Confined;
        let container = first_line(&docker, &engine.image, within).await.context("a task in a container")?;
        let alone =
            first_line(&process, "none", ProcessIsolation::Own).await.context("a task as a process")?;
        let kept_in = first_line(&process, "none", within).await.context("a task as a confined process")?;
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
    show(out, "docker run, host network, to first line", &mut lines)?;
    show(out, "docker run, host network, to its end", &mut exits)?;
    show(out, "docker task, submit to its runner's answer", &mut answers)?;
    show(out, "docker task, submit to the job's first line", &mut ours)?;
    let more = (mine.as_secs_f64() - theirs.as_secs_f64()) * 1e3;
    let ratio = mine.as_secs_f64() / theirs.as_secs_f64();
    writeln!(out, "{:<46} {more:>+9.1} ms   {ratio:.2} times", "… more than docker run to first line")?;
    show(out, "process task, submit to its runner's answer", &mut plain_answers)?;
    show(out, "process task, submit to the job's first line", &mut plain)?;
    show(out, "confined task, submit to its runner's answer", &mut confined_answers)?;
    show(out, "confined task, submit to the job's first line", &mut confined)
}

/// Starts a task whose job says one word. Gives the times until its runner answered and until the word came.
async fn first_line(host: &Host, image: &str, isolation: ProcessIsolation) -> Result<(Duration, Duration)> {
    let shim = host.connect().await?;
    let asked = Instant::now();
    let task = host.submit(&shim, image, isolation).await?;
    task.hand_over(&job(&["echo", "hello"])?).await?;
    let answered = asked.elapsed();
    task.run().await?;
    let part = shim.log(task.id, "job", 0, READ, WAIT).await?;
    let line = asked.elapsed();
    ensure!(part.bytes == "hello\n", "the job said {:?}", part.bytes);
    task.done().await?;
    Ok((answered, line))
}

/// How fast output is kept, alone and while others read it.
async fn output(agent: &Path, scratch: &Path, out: &mut impl Write) -> Result<()> {
    let noise = scratch.join("noise");
    std::fs::write(&noise, Rng::new(1).bytes(OUTPUT))?;
    let host = Host::start(agent, &scratch.join("output"), &["--runtime", "process", "--processes", "own"])?;
    let file = noise.to_str().context("a path that is text")?;
    for tailers in [0, TAILERS] {
        let shim = host.connect().await?;
        let task = host.submit(&shim, "none", ProcessIsolation::Own).await?;
        task.hand_over(&job(&["cat", file])?).await?;
        let runner = host.runner(task.id)?;
        let started = Instant::now();
        task.run().await?;
        let mut reading = tokio::task::JoinSet::new();
        for _ in 0..tailers {
            reading.spawn(tail(host.connect().await?, task.id));
        }
        let kept = kept(&task).await?.duration_since(started);
        while let Some(read) = reading.join_next().await {
            ensure!(read?? == OUTPUT as u64, "a tailer missed something");
        }
        let read = started.elapsed();
        let peak = runner.peak_kb()? / 1024.0;
        task.done().await?;
        let rate = |taken: Duration| OUTPUT as f64 / 1e6 / taken.as_secs_f64();
        let what = format!("output of one job, {tailers} tailers");
        write!(out, "{what:<46} {:>9.0} MB/s kept", rate(kept))?;
        if tailers > 0 {
            write!(out, "   {:.0} MB/s read by each", rate(read))?;
        }
        writeln!(out, "   runner's peak {peak:.1} MB")?;
    }
    Ok(())
}

/// Waits until the job's output is complete.
async fn kept(task: &Task) -> Result<Instant> {
    loop {
        // From the end on: nothing comes back but that it is complete.
        let part = task.shim.log(task.id, "job", OUTPUT as u64, 0, WAIT).await?;
        if part.is_complete {
            ensure!(part.end == OUTPUT as u64, "{} bytes were kept", part.end);
            return Ok(Instant::now());
        }
    }
}

async fn tail(shim: Shim, id: windlass_model::id::SubmissionId) -> Result<u64> {
    let mut offset = 0;
    loop {
        let part = shim.log(id, "job", offset, READ, WAIT).await?;
        offset += part.bytes.len() as u64;
        if part.is_complete && offset >= part.end {
            return Ok(offset);
        }
    }
}

/// Many hosts in one process.
async fn hollow(agent: &Path, scratch: &Path, out: &mut impl Write) -> Result<()> {
    let one = Host::start(agent, &scratch.join("hollow-one"), &["--runtime", "hollow"])?;
    tokio::time::sleep(SETTLE).await;
    let alone = one.resident_kb()?;
    drop(one);
    let count = HOLLOW_HOSTS.to_string();
    let host = Host::start(agent, &scratch.join("hollow"), &["--runtime", "hollow", "--hosts", &count])?;
    tokio::time::sleep(SETTLE).await;
    let idle = host.resident_kb()?;
    for number in 1..=HOLLOW_HOSTS {
        let shim = host.connect_to(number).await?;
        host.submit(&shim, "none", ProcessIsolation::Own).await?;
    }
    let busy = host.resident_kb()?;
    let each = |kb: f64| (kb - alone) / HOLLOW_HOSTS as f64;
    writeln!(
        out,
        "{:<46} {:>9.0} ms to answer   {:.1} kB each   {:.1} kB each with a task",
        format!("{HOLLOW_HOSTS} hollow hosts in one process"),
        host.ready.as_secs_f64() * 1e3,
        each(idle),
        each(busy),
    )?;
    Ok(())
}

fn job(commands: &[&str]) -> Result<Submit> {
    let job =
        json!({"run": {"id": "bench"}, "job_spec": {"commands": commands, "user": {"username": "root"}}});
    Ok(serde_json::from_value(job)?)
}

fn median(taken: &mut [Duration]) -> Duration {
    taken.sort();
    taken.get(taken.len() / 2).copied().unwrap_or_default()
}

fn show(out: &mut impl Write, what: &str, taken: &mut [Duration]) -> Result<()> {
    let ms = |taken: Duration| taken.as_secs_f64() * 1e3;
    let middle = ms(median(taken));
    let (Some(first), Some(last)) = (taken.first(), taken.last()) else { return Ok(()) };
    writeln!(
        out,
        "{what:<46} {middle:>9.1} ms   ({:.1} to {:.1}, {} times)",
        ms(*first),
        ms(*last),
        taken.len()
    )?;
    Ok(())
}
