//! Progress of a run until it starts: an animated tree on a terminal, timestamped lines elsewhere.
//!
//! The tree is the last thing on the screen. Other output erases it first, and it is drawn again below.

use std::io::{IsTerminal as _, Write as _};

use tokio::time::Instant;
use windlass_model::time::Span;

use super::{
    log_printer::JobIndex,
    progress::{JobProgress, PullProgress},
};
use crate::output::{
    self, format,
    style::{Colour, Style},
};

const FRAMES: [&str; 10] = ["⠋", "⠙", "⠹", "⠸", "⠼", "⠴", "⠦", "⠧", "⠇", "⠏"];
const BAR_WIDTH: usize = 24;
/// Maximum number of jobs drawn; the others are counted.
const JOBS_DRAWN_MAX: usize = 12;
/// Width if the terminal does not report one.
const DEFAULT_COLUMNS: usize = 80;

/// The last reported step of a job.
type ReportedStep = (JobIndex, (String, Option<u64>));

/// Progress display.
pub(crate) struct ProgressTree {
    name: String,
    is_live: bool,
    began: Instant,
    frame: usize,
    /// Number of lines to erase.
    drawn: usize,
    /// Steps reported for each job since it last ran, so that attempts that fail alike are not repeated.
    reported: Vec<ReportedStep>,
    status: String,
}

impl ProgressTree {
    pub(crate) fn new(name: &str) -> Self {
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        Self {
            name: name.to_owned(),
            is_live: std::io::stderr().is_terminal() && !dumb,
            began: Instant::now(),
            frame: 0,
            drawn: 0,
            reported: Vec::new(),
            status: String::new(),
        }
    }

    /// Returns whether the tree must be redrawn as time passes.
    pub(crate) fn is_animated(&self) -> bool {
        self.is_live && self.drawn > 0
    }

    /// Shows the state of the jobs, as a tree until the run starts. `status` is that of the run.
    pub(crate) fn show(&mut self, status: &str, jobs: &[JobProgress], is_coming: bool) {
        if !self.is_live {
            return self.print(status, jobs);
        }
        self.erase();
        if is_coming {
            let lines = self.lines(status, jobs, columns(), Style::stderr());
            self.frame += 1;
            self.drawn = lines.len();
            lines.iter().for_each(|line| output::print_message(line));
        } else {
            // The final state stays on the screen.
            self.print(status, jobs);
        }
    }

    /// Erases the tree, if it is drawn.
    pub(crate) fn erase(&mut self) {
        if self.drawn > 0 {
            let mut out = std::io::stderr().lock();
            let _ = write!(out, "\x1b[{}A\r\x1b[J", self.drawn).and_then(|()| out.flush());
            self.drawn = 0;
        }
    }

    /// Timestamp prefix, if the output is not a terminal.
    fn stamp(&self) -> String {
        if self.is_live { String::new() } else { format!("{} ", format::timestamp(format::now())) }
    }

    /// Prints a line about the run as a whole. The tree must be erased.
    pub(crate) fn line(&self, text: &str) {
        output::print_message(&format!("{}{}: {}", self.stamp(), self.name, output::printable(text)));
    }

    /// Prints each step once, with its time.
    fn print(&mut self, status: &str, jobs: &[JobProgress]) {
        let stamp = self.stamp();
        let style = Style::stderr();
        if jobs.is_empty() && status != self.status {
            self.status = status.to_owned();
            output::print_message(&format!("{stamp}{}: {}", self.name, paint_status(style, status, status)));
        }
        let several = jobs.len() > 1;
        for job in jobs {
            let step = job.milestone();
            let step = ((job.replica, job.job), step);
            if self.reported.contains(&step) {
                continue;
            }
            if job.status == "running" {
                self.reported.retain(|(place, _)| *place != step.0);
            }
            self.reported.push(step);
            let who = if several { format!("{} {}", self.name, job.label()) } else { self.name.clone() };
            output::print_message(&format!(
                "{stamp}{who}: {}",
                paint_status(style, &job.status, &job.words())
            ));
        }
    }

    fn lines(&self, status: &str, jobs: &[JobProgress], columns: usize, style: Style) -> Vec<String> {
        let spinner = FRAMES[self.frame % FRAMES.len()];
        let elapsed = format::span(Span::secs(i64::try_from(self.began.elapsed().as_secs()).unwrap_or(0)));
        let head = format!("{spinner} {}  {}  {elapsed}", self.name, output::printable(status));
        let mut lines = vec![style.paint(Colour::Bold, &truncate(&head, columns))];
        let width = jobs.iter().map(|job| job.label().len()).max().unwrap_or(0);
        let shown = &jobs[..jobs.len().min(JOBS_DRAWN_MAX)];
        for (index, job) in shown.iter().enumerate() {
            let is_last = index + 1 == jobs.len();
            let branch = if is_last { "└─" } else { "├─" };
            let mut text = format!("{branch} {:width$}  ", job.label());
            if let Some(pull) = &job.pull {
                text.push_str(&render_bar(pull));
            }
            text.push_str(&output::printable(&job.words().replace('\n', " ")));
            let colour = if job.is_starting() { Colour::None } else { Colour::for_status(&job.status) };
            lines.push(style.paint(colour, &truncate(&text, columns)));
        }
        if jobs.len() > shown.len() {
            lines.push(truncate(&format!("└─ and {} more", jobs.len() - shown.len()), columns));
        }
        lines
    }
}

fn paint_status(style: Style, status: &str, text: &str) -> String {
    style.paint(Colour::for_status(status), &output::printable(text))
}

fn render_bar(pull: &PullProgress) -> String {
    let percent = pull.percent();
    let full = usize::try_from(percent).unwrap_or(0) * BAR_WIDTH / 100;
    format!("[{}{}] {percent:>3}% ", "█".repeat(full), "░".repeat(BAR_WIDTH - full))
}

/// Truncates a line, because a wrapped line could not be erased.
fn truncate(text: &str, columns: usize) -> String {
    let room = columns.saturating_sub(1);
    if text.chars().count() <= room {
        return text.to_owned();
    }
    text.chars().take(room.saturating_sub(1)).chain(['…']).collect()
}

fn columns() -> usize {
    let size = rustix::termios::tcgetwinsize(std::io::stderr());
    size.ok().map(|size| usize::from(size.ws_col)).filter(|columns| *columns > 0).unwrap_or(DEFAULT_COLUMNS)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{
        super::progress::{job_progress, tests::run},
        ProgressTree, Style,
    };

    #[test]
    fn tree_has_a_branch_per_job_and_a_bar_for_image_pulls() {
        let jobs = job_progress(&run(&[
            json!({"status": "submitted", "queue_position": 2}),
            json!({"status": "pulling", "image_pull_progress": {"downloaded_bytes": 500_000, "extracted_bytes": 500_000,
                "total_bytes": 1_000_000, "is_total_bytes_final": true}}),
            json!({"status": "running", "status_message": "running"}),
        ]));
        let tree = ProgressTree::new("train");
        assert_eq!(
            tree.lines("provisioning", &jobs, 100, Style::plain()),
            [
                "⠋ train  provisioning  0 s",
                "├─ 0-0  queued, 2 ahead of it",
                "├─ 1-0  [████████████░░░░░░░░░░░░]  50% pulling the image, 500 kB of 1 MB",
                "└─ 2-0  running",
            ]
        );
        for line in tree.lines("provisioning", &jobs, 20, Style::plain()) {
            assert!(line.chars().count() < 20, "it would wrap: {line}");
        }
    }

    #[test]
    fn tree_draws_a_limited_number_of_jobs_and_counts_the_rest() {
        let jobs = job_progress(&run(&vec![json!({"status": "submitted"}); 40]));
        let lines = ProgressTree::new("train").lines("submitted", &jobs, 80, Style::plain());
        assert_eq!((lines.len(), lines.last().unwrap().as_str()), (14, "└─ and 28 more"));
    }
}
