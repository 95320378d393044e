//! What a job runs in: a container of an image, or a plain process of the machine.
//!
//! An image is a promise of isolation: a job that names one never runs outside of it. `image: none` asks for a plain
//! process in words. A job that says nothing is a plain process where the machine allows it, and else runs in the default
//! image that the server, the project or the profile names.

use std::fmt::{self, Display};

use serde::{Deserialize, Serialize};

use crate::{config::job_spec::JobSpec, explain::Shortfall};

/// The `image` of a job that is to be a plain process.
pub const NO_IMAGE: &str = "none";
/// The `image` of a request that only asks for offers: it is never run.
pub const OFFERS_ONLY: &str = "scratch";

/// What a machine runs jobs in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Runtimes {
    pub containers: bool,
    pub processes: bool,
}

impl Runtimes {
    /// By the name of the agent's runtime. `None` where it says nothing about real machines.
    pub fn parse(name: &str) -> Option<Self> {
        match name {
            "any" => Some(Self { containers: true, processes: true }),
            "docker" => Some(Self { containers: true, processes: false }),
            "process" => Some(Self { containers: false, processes: true }),
            _ => None,
        }
    }
}

/// What a job asks to run in.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ImageChoice {
    Image(String),
    /// `image: none`.
    PlainProcess,
    /// It names no image. `image` is the one to use where plain processes are not allowed.
    Default {
        image: Option<String>,
    },
}

impl ImageChoice {
    /// `None` for a specification that only asks for offers.
    pub fn of(spec: &JobSpec) -> Option<Self> {
        match spec.image_name.as_str() {
            OFFERS_ONLY => None,
            NO_IMAGE => Some(Self::PlainProcess),
            "" => Some(Self::Default { image: spec.default_image.clone() }),
            image => Some(Self::Image(image.to_owned())),
        }
    }

    /// What the job runs in on a machine with these runtimes, or why it cannot run there. A machine whose runtimes are
    /// not known is taken to have what is asked for; its agent refuses what it cannot do.
    pub fn on(&self, runtimes: Option<Runtimes>) -> Result<RunsIn<'_>, Shortfall> {
        let containers = runtimes.is_none_or(|runtimes| runtimes.containers);
        let processes = runtimes.is_none_or(|runtimes| runtimes.processes);
        match self {
            Self::Image(image) if containers => Ok(RunsIn::Container { image }),
            Self::Image(image) => Err(Shortfall::NoContainers { image: image.clone() }),
            Self::PlainProcess | Self::Default { .. } if processes => Ok(RunsIn::Process),
            Self::PlainProcess => Err(Shortfall::NoProcesses),
            Self::Default { image: Some(image) } => Ok(RunsIn::Container { image }),
            Self::Default { image: None } => Err(Shortfall::NoDefaultImage),
        }
    }
}

/// What a job runs in on one machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunsIn<'a> {
    Container { image: &'a str },
    Process,
}

impl<'a> RunsIn<'a> {
    /// The image that the agent is told.
    pub fn image_name(self) -> &'a str {
        match self {
            Self::Container { image } => image,
            Self::Process => NO_IMAGE,
        }
    }
}

/// `a container of image debian:12`, `a plain process, without an image`.
impl Display for RunsIn<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Container { image } => write!(f, "a container of image {image}"),
            Self::Process => f.write_str("a plain process, without an image"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOTH: Runtimes = Runtimes { containers: true, processes: true };
    const CONTAINERS: Runtimes = Runtimes { containers: true, processes: false };
    const PROCESSES: Runtimes = Runtimes { containers: false, processes: true };

    #[test]
    fn a_job_with_an_image_never_runs_outside_of_one() {
        let image = ImageChoice::Image("debian:12".into());
        for runtimes in [None, Some(BOTH), Some(CONTAINERS)] {
            assert_eq!(image.on(runtimes), Ok(RunsIn::Container { image: "debian:12" }));
        }
        assert_eq!(image.on(Some(PROCESSES)), Err(Shortfall::NoContainers { image: "debian:12".into() }));
    }

    #[test]
    fn a_job_without_an_image_is_a_process_where_that_is_allowed_and_runs_in_the_default_image_elsewhere() {
        let with = ImageChoice::Default { image: Some("base:1".into()) };
        let without = ImageChoice::Default { image: None };
        for choice in [&with, &without, &ImageChoice::PlainProcess] {
            for runtimes in [None, Some(BOTH), Some(PROCESSES)] {
                assert_eq!(choice.on(runtimes), Ok(RunsIn::Process));
            }
        }
        assert_eq!(with.on(Some(CONTAINERS)), Ok(RunsIn::Container { image: "base:1" }));
        assert_eq!(without.on(Some(CONTAINERS)), Err(Shortfall::NoDefaultImage));
        assert_eq!(ImageChoice::PlainProcess.on(Some(CONTAINERS)), Err(Shortfall::NoProcesses));
    }

    #[test]
    fn runtimes_are_known_by_name() {
        assert_eq!(Runtimes::parse("any"), Some(BOTH));
        assert_eq!(Runtimes::parse("docker"), Some(CONTAINERS));
        assert_eq!(Runtimes::parse("process"), Some(PROCESSES));
        assert_eq!(Runtimes::parse("hollow"), None);
    }
}
