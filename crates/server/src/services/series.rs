//! Series of metrics over the same times, for plots: of jobs, of what runs on instances and fleets, and of services.

use std::collections::{BTreeMap, HashMap, HashSet};

use uuid::Uuid;
use windlass_api::metrics::{ResponseCounts, Series, SeriesList, SeriesOf, SeriesRequest};
use windlass_gateway::stats::quantile_us;
use windlass_model::{
    id::{FleetId, InstanceId, ProjectId, SubmissionId},
    time::{Span, Timestamp},
};

use crate::{
    app::App,
    auth::Caller,
    db::{
        documents::SERVICE_ANSWERS,
        fleets, instances, projects, runs,
        series::{self as rows, JobSample, SampledJob},
    },
    error::{Error, Result},
    job_metrics::{JobResources, cpu_cores},
};

const IDS_MAX: usize = 50;
const POINTS_MAX: u32 = 500;
const JOBS_MAX: usize = 500;
const SAMPLES_MAX: i64 = 200_000;
/// Samples before the period from which the first CPU usage in it is computed.
const LEAD: Span = Span::mins(10);
const STEP_MIN: i64 = 10;
const MICROS: i64 = 1_000_000;
/// Steps of service counts, in microseconds.
const WINDOW_US: f64 = 5e6;
const MINUTE_US: f64 = 6e7;

/// The times of a response: even steps from `first`.
#[derive(Clone, Copy, Debug)]
struct TimeGrid {
    first: i64,
    step: i64,
    count: usize,
}

impl TimeGrid {
    fn of(requested: &SeriesRequest) -> Result<Self> {
        let (from, to) = (requested.from.0.div_euclid(MICROS), requested.to.0.div_euclid(MICROS));
        if from >= to {
            return Err(Error::field("from", "must be before `to`"));
        }
        if !(1..=POINTS_MAX).contains(&requested.points) {
            return Err(Error::field("points", format!("must be from 1 to {POINTS_MAX}")));
        }
        let step = ((to - from).div_euclid(i64::from(requested.points))).max(STEP_MIN);
        // Multiples of the step, so that a page that is drawn again has the same times.
        let first = from - from.rem_euclid(step);
        let count = usize::try_from((to - first).div_euclid(step) + 1).unwrap_or(1);
        Ok(Self { first, step, count: count.min(POINTS_MAX as usize + 2) })
    }

    fn index(&self, at: Timestamp) -> Option<usize> {
        let at = usize::try_from((at.0.div_euclid(MICROS) - self.first).div_euclid(self.step)).ok()?;
        (at < self.count).then_some(at)
    }

    fn times(&self) -> Vec<i64> {
        (0..self.count).map(|at| self.first + self.step * i64::try_from(at).unwrap_or(0)).collect()
    }
}

/// Minimum, sum, number and maximum of the values in a step.
#[derive(Clone, Copy, Debug, Default)]
struct Bin {
    min: f64,
    max: f64,
    sum: f64,
    count: u32,
}

impl Bin {
    fn add(&mut self, value: f64) {
        (self.min, self.max) =
            if self.count == 0 { (value, value) } else { (self.min.min(value), self.max.max(value)) };
        self.sum += value;
        self.count += 1;
    }

    fn mean(&self) -> Option<f64> {
        (self.count > 0).then(|| self.sum / f64::from(self.count))
    }
}

/// Name and device of a series.
type SeriesKey = (&'static str, Option<u32>);

/// Bins of the series of one object.
#[derive(Debug, Default)]
struct ObjectSeries(BTreeMap<SeriesKey, Vec<Bin>>);

impl ObjectSeries {
    fn add(&mut self, key: SeriesKey, grid: TimeGrid, at: Timestamp, value: f64) {
        let Some(index) = grid.index(at) else { return };
        let bins = self.0.entry(key).or_insert_with(|| vec![Bin::default(); grid.count]);
        bins[index].add(value);
    }

    /// Samples of one job, in the order of time.
    fn add_job(&mut self, grid: TimeGrid, samples: &[JobSample]) {
        for pair in samples.windows(2) {
            let (before, point) = (&pair[0], &pair[1]);
            let cores = cpu_cores((point.host_at, point.cpu_us), (before.host_at, before.cpu_us));
            self.add(("cpu", None), grid, point.at, cores);
        }
        for point in samples {
            #[expect(clippy::cast_precision_loss, reason = "bytes for a plot")]
            let memory = point.working_set_bytes as f64;
            self.add(("memory", None), grid, point.at, memory);
            for (device, (bytes, percent)) in (0..).zip(&point.gpus) {
                #[expect(clippy::cast_precision_loss, reason = "bytes and percent for a plot")]
                let (bytes, share) = (*bytes as f64, *percent as f64 / 100.0);
                self.add(("gpu", Some(device)), grid, point.at, share);
                self.add(("gpu_memory", Some(device)), grid, point.at, bytes);
            }
        }
    }

    /// Adds the means of another object: sums of amounts; of GPU use, the mean over all devices.
    fn add_part(&mut self, part: &Self, grid: TimeGrid) {
        for ((name, _), bins) in &part.0 {
            let all = self.0.entry((name, None)).or_insert_with(|| vec![Bin::default(); grid.count]);
            for (sum, bin) in all.iter_mut().zip(bins) {
                let Some(mean) = bin.mean() else { continue };
                if *name == "gpu" {
                    sum.add(mean);
                } else {
                    let (min, max, mean) = (sum.min + bin.min, sum.max + bin.max, sum.sum + mean);
                    *sum = Bin { min, max, sum: mean, count: 1 };
                }
            }
        }
    }

    fn into_wire(self, id: &str, names: &HashSet<&str>, limits: &HashMap<&str, f64>) -> Vec<Series> {
        let of = |bins: &[Bin], value: fn(&Bin) -> f64| -> Vec<Option<f64>> {
            bins.iter().map(|bin| (bin.count > 0).then(|| value(bin))).collect()
        };
        let shown = self.0.into_iter().filter(|((name, _), _)| names.contains(name));
        let series = shown.map(|((name, device), bins)| Series {
            id: id.to_owned(),
            name: name.to_owned(),
            device,
            limit: limits.get(name).copied(),
            min: of(&bins, |bin| bin.min),
            mean: bins.iter().map(Bin::mean).collect(),
            max: of(&bins, |bin| bin.max),
        });
        series.collect()
    }
}

pub(crate) async fn query(app: &App, caller: &Caller, requested: SeriesRequest) -> Result<SeriesList> {
    if requested.ids.len() > IDS_MAX {
        return Err(Error::field("ids", format!("must have at most {IDS_MAX} items")));
    }
    let grid = TimeGrid::of(&requested)?;
    let visible = projects::visible(app.db(), caller.user.id, caller.user.admin).await?;
    let projects: HashMap<ProjectId, String> = visible.into_iter().map(|(id, name, _)| (id, name)).collect();
    let query = SeriesQuery { app, grid, projects, requested: &requested };
    let series = match requested.of {
        SeriesOf::Job => query.jobs().await?,
        SeriesOf::Instance | SeriesOf::Fleet => query.locations().await?,
        SeriesOf::Service => query.services().await?,
    };
    Ok(SeriesList { times: grid.times(), step_seconds: grid.step, series })
}

struct SeriesQuery<'a> {
    app: &'a App,
    grid: TimeGrid,
    /// Projects that the caller may see.
    projects: HashMap<ProjectId, String>,
    requested: &'a SeriesRequest,
}

impl SeriesQuery<'_> {
    fn names(&self) -> HashSet<&str> {
        self.requested.names.iter().map(String::as_str).collect()
    }

    fn ids(&self) -> Result<Vec<Uuid>> {
        let parse = |id: &String| id.parse().map_err(|_| Error::field("ids", "must be UUIDs"));
        self.requested.ids.iter().map(parse).collect()
    }

    async fn samples(&self, jobs: &[SampledJob]) -> Result<HashMap<SubmissionId, Vec<JobSample>>> {
        let ids: Vec<SubmissionId> = jobs.iter().take(JOBS_MAX).map(|job| job.id).collect();
        let from = self.requested.from - LEAD;
        let found = rows::samples(self.app.db(), &ids, from, self.requested.to, SAMPLES_MAX).await?;
        let mut by_job = HashMap::<SubmissionId, Vec<JobSample>>::new();
        for sample in found {
            by_job.entry(sample.job_id).or_default().push(sample);
        }
        Ok(by_job)
    }

    async fn jobs(&self) -> Result<Vec<Series>> {
        let ids: Vec<SubmissionId> = self.ids()?.into_iter().map(SubmissionId).collect();
        let mut jobs = rows::jobs(self.app.db(), &ids).await?;
        jobs.retain(|job| self.projects.contains_key(&job.project_id));
        let samples = self.samples(&jobs).await?;
        let (names, mut all) = (self.names(), Vec::new());
        for job in &jobs {
            let mut series = ObjectSeries::default();
            series.add_job(self.grid, samples.get(&job.id).map(Vec::as_slice).unwrap_or_default());
            let limits =
                limits(&JobResources::of(job.id, job.runtime.as_deref(), job.provisioning.as_deref())?);
            all.extend(series.into_wire(&job.id.to_string(), &names, &limits));
        }
        Ok(all)
    }

    /// Series of instances and fleets: of the jobs on them.
    async fn locations(&self) -> Result<Vec<Series>> {
        let ids = self.ids()?;
        let db = self.app.db();
        // Id of the object that an instance belongs to.
        let mut owners = HashMap::<InstanceId, Uuid>::new();
        if self.requested.of == SeriesOf::Fleet {
            let mut visible = Vec::new();
            for id in ids.iter().map(|id| FleetId(*id)) {
                let fleet = fleets::find(db, id).await?;
                visible
                    .extend(fleet.filter(|fleet| self.projects.contains_key(&fleet.project_id)).map(|_| id));
            }
            for (instance, fleet) in rows::instances_of(db, &visible, self.requested.from).await? {
                owners.insert(instance, fleet.0);
            }
        } else {
            for id in ids.iter().map(|id| InstanceId(*id)) {
                let instance = instances::find(db, id).await?;
                if instance.is_some_and(|instance| self.projects.contains_key(&instance.project_id)) {
                    owners.insert(id, id.0);
                }
            }
        }
        let instance_ids: Vec<InstanceId> = owners.keys().copied().collect();
        let mut jobs = rows::jobs_on(db, &instance_ids, self.requested.from, self.requested.to).await?;
        jobs.retain(|job| self.projects.contains_key(&job.project_id));
        let samples = self.samples(&jobs).await?;
        let mut sums = HashMap::<Uuid, ObjectSeries>::new();
        for job in &jobs {
            let owner = job.instance_id.and_then(|instance| owners.get(&instance));
            let (Some(owner), Some(samples)) = (owner, samples.get(&job.id)) else { continue };
            let mut part = ObjectSeries::default();
            part.add_job(self.grid, samples);
            sums.entry(*owner).or_default().add_part(&part, self.grid);
        }
        let names = self.names();
        let none = HashMap::new();
        Ok(sums.into_iter().flat_map(|(id, sum)| sum.into_wire(&id.to_string(), &names, &none)).collect())
    }

    async fn services(&self) -> Result<Vec<Series>> {
        let names = self.names();
        let none = HashMap::new();
        let mut all = Vec::new();
        for id in &self.requested.ids {
            let (project, name) =
                id.split_once('/').ok_or_else(|| Error::field("ids", "must be `PROJECT/RUN`"))?;
            let project = self.projects.iter().find(|(_, known)| *known == project);
            let Some((project, _)) = project else { continue };
            let Some(run) = runs::find_by_name(self.app.db(), *project, name).await? else { continue };
            let mut series = ObjectSeries::default();
            self.add_requests(&mut series, run.run.id).await?;
            self.add_answers(&mut series, run.run.id).await?;
            all.extend(series.into_wire(id, &names, &none));
        }
        Ok(all)
    }

    async fn add_requests(&self, series: &mut ObjectSeries, run: windlass_model::id::RunId) -> Result<()> {
        let (minutes, recent) =
            rows::requests(self.app.db(), run, self.requested.from, self.requested.to).await?;
        let fine_from = recent.first().map(|count| count.at);
        let before = minutes.into_iter().filter(|count| fine_from.is_none_or(|from| count.at < from));
        let counted =
            before.map(|count| (count, MINUTE_US)).chain(recent.into_iter().map(|c| (c, WINDOW_US)));
        for (count, width) in counted {
            #[expect(clippy::cast_precision_loss, reason = "counts for a plot")]
            let [requests, in_flight, waiting] =
                [count.requests, count.in_flight_us, count.waiting_us].map(|number| number as f64);
            series.add(("requests", None), self.grid, count.at, requests / (width / 1e6));
            series.add(("in_flight", None), self.grid, count.at, in_flight / width);
            series.add(("waiting", None), self.grid, count.at, waiting / width);
        }
        Ok(())
    }

    async fn add_answers(&self, series: &mut ObjectSeries, run: windlass_model::id::RunId) -> Result<()> {
        for reported in rows::answers(self.app.db(), run, self.requested.from, self.requested.to).await? {
            let counts: ResponseCounts = SERVICE_ANSWERS.decode(run, &reported.answers)?;
            #[expect(clippy::cast_precision_loss, reason = "counts for a plot")]
            let errors = counts.classes.get(4).copied().unwrap_or(0) as f64;
            series.add(("errors", None), self.grid, reported.at, errors / (WINDOW_US / 1e6));
            for (name, part) in [("p50", 0.5), ("p99", 0.99)] {
                if let Some(us) = quantile_us(&counts.buckets, part) {
                    series.add((name, None), self.grid, reported.at, us / 1e3);
                }
            }
        }
        Ok(())
    }
}

fn limits(resources: &JobResources) -> HashMap<&'static str, f64> {
    let known = [
        ("cpu", resources.cpus),
        ("memory", resources.memory_bytes),
        ("gpu", Some(1)),
        ("gpu_memory", resources.gpu_memory_bytes),
    ];
    #[expect(clippy::cast_precision_loss, reason = "limits of a plot")]
    let limit = |(name, value): (&'static str, Option<i64>)| Some((name, value? as f64));
    known.into_iter().filter_map(limit).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn requested(from: i64, to: i64, points: u32) -> SeriesRequest {
        SeriesRequest {
            of: SeriesOf::Job,
            ids: Vec::new(),
            names: Vec::new(),
            from: Timestamp::from_secs(from),
            to: Timestamp::from_secs(to),
            points,
        }
    }

    #[test]
    fn times_are_even_steps_that_cover_the_period() {
        let grid = TimeGrid::of(&requested(1003, 4603, 60)).unwrap();
        assert_eq!((grid.first, grid.step, grid.times().len()), (960, 60, 61));
        assert_eq!(grid.index(Timestamp::from_secs(1019)), Some(0));
        assert_eq!(grid.index(Timestamp::from_secs(1020)), Some(1));
        assert_eq!(grid.index(Timestamp::from_secs(959)), None);
        assert_eq!(TimeGrid::of(&requested(0, 60, 500)).unwrap().step, STEP_MIN);
        assert!(TimeGrid::of(&requested(5, 5, 10)).is_err() && TimeGrid::of(&requested(0, 9, 501)).is_err());
    }

    #[test]
    fn parts_are_added_and_shares_are_averaged() {
        let grid = TimeGrid::of(&requested(0, 100, 10)).unwrap();
        let part = |cpu: f64, gpu: f64| {
            let mut part = ObjectSeries::default();
            part.add(("cpu", None), grid, Timestamp::from_secs(5), cpu);
            part.add(("cpu", None), grid, Timestamp::from_secs(6), cpu + 2.0);
            part.add(("gpu", Some(0)), grid, Timestamp::from_secs(5), gpu);
            part
        };
        let mut all = ObjectSeries::default();
        all.add_part(&part(1.0, 0.5), grid);
        all.add_part(&part(3.0, 0.7), grid);
        let shown = all.into_wire("x", &HashSet::from(["cpu", "gpu"]), &HashMap::new());
        assert_eq!((shown[0].min[0], shown[0].mean[0], shown[0].max[0]), (Some(4.0), Some(6.0), Some(8.0)));
        assert!((shown[1].mean[0].unwrap() - 0.6).abs() < 1e-9);
        assert_eq!(shown[0].mean[1], None, "nothing was measured there");
    }
}
