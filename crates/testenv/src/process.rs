//! Resource usage of a process, as the kernel reports it.

use std::time::Duration;

use anyhow::{Context, Result};

/// Clock ticks in which the kernel counts CPU time.
const TICKS_PER_SECOND: f64 = 100.0;

/// Share of a core below which a process is considered idle.
const IDLE_SHARE_MAX: f64 = 0.15;
const IDLE_CHECK_INTERVAL: Duration = Duration::from_secs(1);
const IDLE_CHECKS_MAX: usize = 60;

/// Waits until a server has finished its work after the start, such as connecting its hosts or reading catalogues.
pub async fn wait_until_idle(pid: u32) -> Result<()> {
    for _ in 0..IDLE_CHECKS_MAX {
        let before = cpu_secs(pid)?;
        tokio::time::sleep(IDLE_CHECK_INTERVAL).await;
        if cpu_secs(pid)? - before < IDLE_CHECK_INTERVAL.as_secs_f64() * IDLE_SHARE_MAX {
            break;
        }
    }
    Ok(())
}

pub fn resident_mb(pid: u32) -> Result<f64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find(|l| l.starts_with("VmRSS")).context("no VmRSS")?;
    let kb: f64 = line.split_whitespace().nth(1).context("no number")?.parse()?;
    Ok(kb / 1024.0)
}

/// CPU seconds that a process has used.
pub fn cpu_secs(pid: u32) -> Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let (_, after) = stat.rsplit_once(')').context("no name")?;
    let mut fields = after.split_whitespace().skip(11);
    let mut next = || fields.next().context("no times")?.parse::<f64>().context("no number");
    Ok((next()? + next()?) / TICKS_PER_SECOND)
}
