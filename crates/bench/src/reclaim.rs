//! Two projects on one fleet of eight blocks: one borrows all of it, the other takes its share back. With the real server,
//! a real agent and jobs that are processes; the result is a chart of what each project holds over time.

use std::{
    fmt::Write as _,
    io::Write as _,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use windlass_model::id::FleetId;
use windlass_server::db::{DatabaseUrl, Db, Unit, fleets};
use windlass_testenv::{
    server::{Client, Server, submission},
    simulated_hosts::database_url,
    test_hosts::{FLEET, HostOptions, HostRuntime},
};
use windlass_testkit::temp_dir;

use crate::runs::{Binaries, wait_for_hosts};

/// The chart, from the root of the repository.
const CHART: &str = "docs/sharing.svg";
const BLOCKS: usize = 8;
const SHARE_BLOCKS: usize = 4;
/// CPUs of a block: quotas count what jobs hold.
const CPUS_PER_BLOCK: usize = 8;
/// Time that a job waits before others are preempted for it.
const WAIT: Duration = Duration::from_secs(1);
const GRACE: Duration = Duration::from_secs(5);
/// Most of the time of all blocks in which none of them may be held.
const IDLE_MAX: f64 = 0.01;
/// Time that a preempted job needs to exit.
const EXIT_SECS: u64 = 2;
/// Time of the first project's jobs, and of the second one's.
const LONG_SECS: u64 = 45;
const SHORT_SECS: u64 = 20;
/// Time at which the second project submits its jobs, and the end of the observation.
const SECOND_AT: Duration = Duration::from_secs(15);
const END: Duration = Duration::from_secs(60);
const SAMPLE_INTERVAL: Duration = Duration::from_millis(100);
const PROJECTS: [&str; 2] = ["vision", "speech"];

/// Blocks that the projects hold at a time since the beginning.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Sample {
    at: f64,
    held: [usize; 2],
}

/// Result of a run.
struct Observation {
    samples: Vec<Sample>,
    /// Seconds until the second project held its share.
    reclaimed_after: f64,
    /// Part of the time of all blocks, from the first time that all are held, in which none was held.
    idle: f64,
}

/// Plays the run and writes the chart into the repository at `root`.
pub async fn run(binaries: &Binaries<'_>, root: &Path) -> Result<()> {
    let scratch = temp_dir("reclaim")?;
    let observed = observe(binaries, scratch.path()).await?;
    let Observation { reclaimed_after, idle, .. } = observed;
    writeln!(
        std::io::stdout(),
        "`speech` held its share {reclaimed_after:.1} s after it submitted its jobs; blocks were idle for {:.2} % of the time",
        idle * 100.0
    )?;
    check(&observed)?;
    std::fs::write(root.join(CHART), draw(&observed)).with_context(|| format!("failed to write {CHART}"))
}

/// Fails if the share was taken back too late, or if blocks were idle meanwhile.
fn check(observed: &Observation) -> Result<()> {
    let limit = (WAIT + GRACE).as_secs_f64();
    let Observation { reclaimed_after, idle, .. } = *observed;
    ensure!(
        reclaimed_after <= limit,
        "the share was taken back after {reclaimed_after:.1} s: expected {limit:.0} s at most"
    );
    ensure!(
        idle <= IDLE_MAX,
        "blocks were idle for {:.2} % of the time: expected {:.0} % at most",
        idle * 100.0,
        IDLE_MAX * 100.0
    );
    Ok(())
}

async fn observe(binaries: &Binaries<'_>, home: &Path) -> Result<Observation> {
    let data = home.join("server");
    std::fs::create_dir_all(&data)?;
    let options = binaries.server(&data);
    // The first start creates the database and its keys.
    drop(Server::start(&options).await?);
    let hosts = home.join("hosts");
    std::fs::create_dir_all(&hosts)?;
    let host = HostOptions {
        agent: binaries.agent,
        home: &hosts,
        count: 1,
        blocks: i64::try_from(BLOCKS)?,
        runtime: HostRuntime::Process,
    };
    let url = database_url(&data, None);
    let _hosts = host.start(&url, &data.join("keys").join("master")).await?;
    allow_preemption(&url).await?;
    let server = Server::start(&options).await?;
    wait_for_hosts(&server, FLEET, 1).await?;
    let mut client = server.client().await?;
    share_fleet(&mut client).await?;
    let began = Instant::now();
    submit(&mut client, PROJECTS[0], BLOCKS + SHARE_BLOCKS, LONG_SECS).await?;
    let (mut samples, mut submitted_at) = (Vec::new(), None);
    while began.elapsed() < END {
        if submitted_at.is_none() && began.elapsed() >= SECOND_AT {
            submit(&mut client, PROJECTS[1], SHARE_BLOCKS, SHORT_SECS).await?;
            submitted_at = Some(began.elapsed().as_secs_f64());
        }
        let held =
            [held_blocks(&mut client, PROJECTS[0]).await?, held_blocks(&mut client, PROJECTS[1]).await?];
        samples.push(Sample { at: began.elapsed().as_secs_f64(), held });
        tokio::time::sleep(SAMPLE_INTERVAL).await;
    }
    let submitted_at = submitted_at.context("the second project did not submit")?;
    evaluate(samples, submitted_at)
}

/// Lets jobs of the fleet be preempted. It belongs to hosts that exist, so there is no configuration to apply.
async fn allow_preemption(url: &str) -> Result<()> {
    let db = Db::open(&url.parse::<DatabaseUrl>()?).await?;
    let rows = db.query("SELECT id, spec FROM fleets WHERE name = 'simulated'", Vec::new()).await?;
    let row = rows.first().context("no fleet")?;
    let (fleet, mut spec): (FleetId, Value) = (FleetId(row.uuid(0)?), serde_json::from_str(&row.text(1)?)?);
    spec["configuration"] = json!({"type": "fleet", "name": FLEET, "nodes": {"min": 0, "max": 1},
        "preemption": {"min_run": 2, "wait": WAIT.as_secs(), "grace": GRACE.as_secs()}});
    db.write(Unit::new().and([fleets::set_spec(fleet, &spec.to_string(), None)])).await?.done()?;
    db.close().await;
    Ok(())
}

async fn share_fleet(client: &mut Client) -> Result<()> {
    for project in PROJECTS {
        client.post("/api/projects/create", &json!({"project_name": project})).await?;
    }
    let export = json!({"name": "shared", "importer_projects": PROJECTS, "exported_fleets": [FLEET]});
    client.post("/api/project/main/exports/create", &export).await?;
    for project in PROJECTS {
        let share = json!({"resource": "cpu", "share": SHARE_BLOCKS * CPUS_PER_BLOCK, "max": BLOCKS * CPUS_PER_BLOCK});
        client.post(&format!("/api/project/{project}/quotas/set"), &share).await?;
    }
    Ok(())
}

/// Submits jobs that run for some time, and that need a while to exit when they are asked to.
async fn submit(client: &mut Client, project: &str, count: usize, secs: u64) -> Result<()> {
    let tenths = secs * 10;
    let command = format!(
        "trap 'sleep {EXIT_SECS}; exit 0' TERM; n=0; while [ $n -lt {tenths} ]; do sleep 0.1; n=$((n+1)); done"
    );
    for number in 1..=count {
        let task = json!({"type": "task", "name": format!("{project}-{number}"), "image": "none", "user": "root",
            "commands": [command], "fleets": [format!("main/{FLEET}")],
            "retry": {"on_events": ["interruption"], "duration": 3600},
            "resources": {"cpu": {"arch": "x86", "count": {"min": 1}}, "memory": {"min": 0.1}, "disk": null}});
        client.post(&format!("/api/project/{project}/runs/apply"), &submission(&task)).await?;
    }
    Ok(())
}

/// Number of blocks that jobs of a project hold, also those that exit.
async fn held_blocks(client: &mut Client, project: &str) -> Result<usize> {
    let body = json!({"project_name": project, "only_active": true, "limit": 50, "job_submissions_limit": 1});
    let runs = client.post("/api/runs/list", &body).await?;
    let holds = |run: &&Value| {
        let status = run["latest_job_submission"]["status"].as_str().unwrap_or_default();
        ["provisioning", "pulling", "running", "terminating"].contains(&status)
    };
    Ok(runs.as_array().context("no list of runs")?.iter().filter(holds).count())
}

fn evaluate(samples: Vec<Sample>, submitted_at: f64) -> Result<Observation> {
    let full = samples.iter().position(|one| one.held[0] == BLOCKS).context("nothing was borrowed")?;
    let reclaimed =
        samples.iter().find(|one| one.held[1] == SHARE_BLOCKS).context("nothing was taken back")?;
    let reclaimed_after = reclaimed.at - submitted_at;
    let (mut idle, mut all) = (0.0, 0.0);
    for pair in samples[full..].windows(2) {
        let lasts = pair[1].at - pair[0].at;
        let held: usize = pair[0].held.iter().sum();
        idle += lasts * BLOCKS.saturating_sub(held) as f64;
        all += lasts * BLOCKS as f64;
    }
    Ok(Observation { samples, reclaimed_after, idle: idle / all })
}

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 330.0;
const LEFT: f64 = 52.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 64.0;
const BOTTOM: f64 = 48.0;
const COLOURS: [&str; 2] = ["#1f6feb", "#bc4c00"];

/// Draws what the projects hold, one above the other.
fn draw(observed: &Observation) -> String {
    let end = observed.samples.last().map_or(1.0, |last| last.at);
    let x = |at: f64| LEFT + (WIDTH - LEFT - RIGHT) * at / end;
    let y = |blocks: usize| HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * blocks as f64 / BLOCKS as f64;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" \
         font-family=\"system-ui, sans-serif\" font-size=\"12\" fill=\"#1f2328\">\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#ffffff\"/>\n\
         <text x=\"16\" y=\"24\" font-size=\"15\" font-weight=\"600\">Two projects on eight blocks, with a share of four \
         each</text>\n<text x=\"16\" y=\"44\" fill=\"#59636e\">speech held its share {:.1} s after it submitted its jobs \
         (wait: {} s, grace: {} s); blocks were idle for {:.1} % of the time</text>\n",
        observed.reclaimed_after,
        WAIT.as_secs(),
        GRACE.as_secs(),
        observed.idle * 100.0
    );
    for blocks in (0..=BLOCKS).step_by(2) {
        let _ = writeln!(
            out,
            "<path d=\"M{LEFT} {at:.1}H{:.1}\" stroke=\"#d8dee4\"/><text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\" \
             fill=\"#59636e\">{blocks}</text>",
            WIDTH - RIGHT,
            LEFT - 8.0,
            y(blocks) + 4.0,
            at = y(blocks)
        );
    }
    for (number, name) in PROJECTS.iter().enumerate() {
        let below = |sample: &Sample| sample.held[..number].iter().sum::<usize>();
        let above = |sample: &Sample| sample.held[..=number].iter().sum::<usize>();
        let mut path = format!("M{:.1} {:.1}", x(0.0), y(0));
        let steps = changes(&observed.samples, above);
        steps.iter().for_each(|(at, blocks)| {
            let _ = write!(path, "H{:.1}V{:.1}", x(*at), y(*blocks));
        });
        let _ = write!(path, "H{:.1}", x(end));
        let back = changes(&observed.samples, below);
        let _ = write!(path, "V{:.1}", y(back.last().map_or(0, |(_, blocks)| *blocks)));
        for pair in back.windows(2).rev() {
            let _ = write!(path, "H{:.1}V{:.1}", x(pair[1].0), y(pair[0].1));
        }
        let colour = COLOURS[number];
        let _ = writeln!(out, "<path d=\"{path}H{:.1}Z\" fill=\"{colour}\" fill-opacity=\"0.75\"/>", x(0.0));
        let label = WIDTH - RIGHT - 150.0 + 80.0 * number as f64;
        let _ = writeln!(
            out,
            "<rect x=\"{label}\" y=\"{:.1}\" width=\"11\" height=\"11\" fill=\"{colour}\" fill-opacity=\"0.75\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\">{name}</text>",
            TOP - 20.0,
            label + 16.0,
            TOP - 10.0
        );
    }
    let submitted_at = SECOND_AT.as_secs_f64();
    let _ = writeln!(
        out,
        "<path d=\"M{LEFT} {share:.1}H{right:.1}\" stroke=\"#1f2328\" stroke-dasharray=\"5 4\"/>\n\
         <path d=\"M{ask:.1} {TOP}V{bottom:.1}\" stroke=\"#1f2328\" stroke-dasharray=\"2 3\"/>\n\
         <text x=\"{:.1}\" y=\"{:.1}\">speech submits {SHARE_BLOCKS} jobs</text>",
        x(submitted_at) + 6.0,
        HEIGHT - BOTTOM - 8.0,
        share = y(SHARE_BLOCKS),
        right = WIDTH - RIGHT,
        ask = x(submitted_at),
        bottom = HEIGHT - BOTTOM
    );
    for secs in (0..=END.as_secs()).step_by(10) {
        let at = x((secs as f64).min(end));
        let _ = writeln!(
            out,
            "<text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#59636e\">{secs}</text>",
            HEIGHT - BOTTOM + 18.0
        );
    }
    let _ = writeln!(
        out,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#59636e\">seconds; blocks that jobs hold</text>\n</svg>",
        f64::midpoint(LEFT, WIDTH - RIGHT),
        HEIGHT - 10.0
    );
    out
}

/// Times at which a value changes, with the new value.
fn changes(samples: &[Sample], value: impl Fn(&Sample) -> usize) -> Vec<(f64, usize)> {
    let mut found: Vec<(f64, usize)> = vec![(0.0, 0)];
    for sample in samples {
        if found.last().is_some_and(|(_, last)| *last != value(sample)) {
            found.push((sample.at, value(sample)));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples() -> Vec<Sample> {
        let held =
            [(0.0, [0, 0]), (1.0, [8, 0]), (15.0, [8, 0]), (19.0, [4, 3]), (20.0, [4, 4]), (40.0, [8, 0])];
        held.map(|(at, held)| Sample { at, held }).into()
    }

    #[test]
    fn the_time_until_the_share_is_held_and_idle_blocks_are_counted() {
        let observed = evaluate(samples(), 15.5).unwrap();
        assert!((observed.reclaimed_after - 4.5).abs() < 1e-9);
        // One of eight blocks for one of 39 seconds.
        assert!((observed.idle - 1.0 / (39.0 * 8.0)).abs() < 1e-9);
        assert!(evaluate(samples()[..2].to_vec(), 15.5).is_err(), "nothing is taken back");
    }

    #[test]
    fn a_share_that_is_taken_back_late_or_idle_blocks_fail() {
        check(&evaluate(samples(), 14.0).unwrap()).unwrap();
        assert!(
            check(&evaluate(samples(), 13.9).unwrap()).is_err(),
            "more than the wait and the grace period"
        );
        let mut gaps = samples();
        gaps.insert(4, Sample { at: 19.5, held: [0, 0] });
        assert!(check(&evaluate(gaps, 15.5).unwrap()).is_err(), "all blocks for half a second");
    }

    #[test]
    fn the_chart_has_an_area_for_each_project() {
        let chart = draw(&evaluate(samples(), 15.5).unwrap());
        assert!(COLOURS.iter().all(|colour| chart.contains(&format!("Z\" fill=\"{colour}\""))));
        assert!(chart.contains(">vision<") && chart.contains(">speech<") && chart.ends_with("</svg>\n"));
    }
}
