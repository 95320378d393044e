//! Mount points and the volumes that may fill them, for placement, submission and attaching.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use windlass_model::{
    config::{
        job_spec::JobSpec,
        mounts::{Mount, VolumeMount},
        name::ResourceReference,
        volume::Volume as Configuration,
    },
    id::ProjectId,
    plan::offers::Location,
    volume::Status,
};

use crate::{
    db::{
        Db, DbError,
        documents::{JOB_SPEC, VOLUME_CONFIGURATION, VOLUME_PROVISIONING},
        instances::Instance,
        jobs::Job,
        volumes::{self, Volume},
    },
    pass_error::PassError,
};

#[derive(Deserialize)]
struct Document {
    volumes: Option<Vec<Mount>>,
}

/// Mount points of a stored job that need a network volume.
pub fn for_job(job: &Job) -> Result<Vec<VolumeMount>, PassError> {
    let document: Document = JOB_SPEC.decode(job.id, &job.job_spec)?;
    Ok(network_mounts(document.volumes.as_deref()))
}

pub fn for_spec(spec: &JobSpec) -> Vec<VolumeMount> {
    network_mounts(spec.volumes.as_deref())
}

fn network_mounts(mounts: Option<&[Mount]>) -> Vec<VolumeMount> {
    let volume = |mount: &Mount| match mount {
        Mount::Volume(mount) => Some(mount.clone()),
        Mount::Instance(_) => None,
    };
    mounts.unwrap_or_default().iter().filter_map(volume).collect()
}

/// Volumes that some mount points of a project's jobs name: its own, and those that others export to it. By the name in
/// the mount point, `name` or `project/name`.
#[derive(Clone, Debug, Default)]
pub struct VolumeCatalog(BTreeMap<String, Volume>);

impl VolumeCatalog {
    pub async fn of<'a>(
        db: &Db,
        project: ProjectId,
        mounts: impl IntoIterator<Item = &'a VolumeMount>,
    ) -> Result<Self, DbError> {
        let names: BTreeSet<&str> =
            mounts.into_iter().flat_map(|mount| mount.name.as_slice()).map(String::as_str).collect();
        if names.is_empty() {
            return Ok(Self::default());
        }
        let named: Vec<(&str, ResourceReference)> =
            names.into_iter().filter_map(|text| Some((text, ResourceReference::parse(text)?))).collect();
        let names: Vec<&str> = named.iter().map(|(_, reference)| reference.name.as_str()).collect();
        let found = volumes::find_named(db, project, &names).await?;
        let select = |(text, wanted): &(&str, ResourceReference)| {
            let is_wanted = |owner: &String| wanted.project.as_ref().is_none_or(|project| project == owner);
            let mut of_name =
                found.iter().filter(|(volume, owner)| volume.name == wanted.name && is_wanted(owner));
            of_name.next().map(|(volume, _)| ((*text).to_owned(), volume.clone()))
        };
        Ok(Self(named.iter().filter_map(select).collect()))
    }

    pub fn named(&self, name: &str) -> Option<&Volume> {
        self.0.get(name)
    }

    /// For `Needs.volumes`: one entry per mount point, the locations of the volumes that may fill it.
    pub fn locations(&self, mounts: &[VolumeMount]) -> Result<Vec<Vec<Location>>, PassError> {
        let usable = |mount: &VolumeMount| {
            let found = mount.name.as_slice().iter().filter_map(|name| self.0.get(name));
            found.filter(|volume| unusable_reason(volume).is_none()).map(location).collect()
        };
        mounts.iter().map(usable).collect()
    }

    /// Reason why no instance could ever have a mount point filled, if any.
    pub fn problem(&self, mounts: &[VolumeMount]) -> Option<String> {
        mounts.iter().find_map(|mount| {
            let problems: Option<Vec<String>> =
                mount.name.as_slice().iter().map(|name| self.volume_problem(name)).collect();
            problems.map(|problems| problems.join("; "))
        })
    }

    /// Reason why a volume cannot be mounted, if any.
    fn volume_problem(&self, name: &str) -> Option<String> {
        match self.0.get(name) {
            None => Some(format!("volume `{name}` does not exist")),
            Some(volume) => unusable_reason(volume),
        }
    }

    /// Problem with the mount points of a run's jobs, as a message for its user. `many` returns whether a backend
    /// attaches one volume to several instances.
    pub fn refuse(
        &self,
        jobs: &[Vec<VolumeMount>],
        many: impl Fn(&str) -> bool,
    ) -> Result<Option<String>, PassError> {
        let mut fixed: BTreeSet<&str> = BTreeSet::new();
        for mounts in jobs {
            if let Some(problem) = self.problem(mounts) {
                return Ok(Some(problem));
            }
            let mut here: BTreeSet<&str> = BTreeSet::new();
            let mut places: Option<(&str, BTreeSet<(String, String)>)> = None;
            for mount in mounts {
                let names = mount.name.as_slice();
                for name in names {
                    if !here.insert(name) {
                        return Ok(Some(format!(
                            "volume `{name}` is mounted twice; a volume may be mounted once per run"
                        )));
                    }
                }
                let set = self.places(names)?;
                match &places {
                    Some((path, known)) if *known != set => {
                        return Ok(Some(format!(
                            "the volumes at `{path}` are in {}, those at `{}` in {}; all mount points of a run \
                             must have volumes in the same backends and regions",
                            format_regions(known),
                            mount.path,
                            format_regions(&set)
                        )));
                    }
                    Some(_) => {}
                    None => places = Some((&mount.path, set)),
                }
                // Where there is no alternative, two jobs cannot both have it.
                if let [name] = names
                    && !fixed.insert(name)
                    && !self.0.get(name).map(backend).transpose()?.is_some_and(|backend| many(&backend))
                {
                    return Ok(Some(format!(
                        "volume `{name}` would be mounted by two jobs of the run; use one volume per job, \
                         such as `{name}-${{{{ dstack.node_rank }}}}`"
                    )));
                }
            }
        }
        Ok(None)
    }

    fn places(&self, names: &[String]) -> Result<BTreeSet<(String, String)>, PassError> {
        let found = names.iter().filter_map(|name| self.0.get(name));
        found.map(|volume| location(volume).map(|at| (at.backend, at.region))).collect()
    }
}

fn format_regions(places: &BTreeSet<(String, String)>) -> String {
    let place = |(backend, region): &(String, String)| match region.is_empty() {
        true => backend.clone(),
        false => format!("{backend}/{region}"),
    };
    places.iter().map(place).collect::<Vec<_>>().join(", ")
}

/// Reason why a volume accepts no new job, if any.
pub(super) fn unusable_reason(volume: &Volume) -> Option<String> {
    let name = &volume.name;
    match volume.status {
        Status::Active if volume.delete_asked_at.is_some() => {
            Some(format!("volume `{name}` is being deleted"))
        }
        Status::Active => None,
        Status::Submitted | Status::Provisioning => {
            Some(format!("volume `{name}` is not ready yet; only active volumes can be mounted"))
        }
        Status::Failed => Some(format!(
            "volume `{name}` failed: {}",
            volume.status_message.as_deref().unwrap_or("its backend did not create it")
        )),
    }
}

pub(crate) fn configuration(volume: &Volume) -> Result<Configuration, PassError> {
    Ok(VOLUME_CONFIGURATION.decode(volume.id, &volume.configuration)?)
}

pub(crate) fn backend(volume: &Volume) -> Result<String, PassError> {
    Ok(configuration(volume)?.backend().to_owned())
}

/// Backend's data of a volume that it created; only the zone is needed here.
#[derive(Default, Deserialize)]
struct ProvisioningData {
    availability_zone: Option<String>,
}

/// Location of a volume: as configured, and in the zone that its backend chose.
pub fn location(volume: &Volume) -> Result<Location, PassError> {
    let wanted = configuration(volume)?;
    let made: ProvisioningData = match &volume.provisioning {
        Some(made) => VOLUME_PROVISIONING.decode(volume.id, made)?,
        None => ProvisioningData::default(),
    };
    Ok(Location {
        backend: wanted.backend().to_owned(),
        region: wanted.region().to_owned(),
        zone: made.availability_zone.or_else(|| wanted.zone().map(str::to_owned)),
    })
}

/// Returns whether a volume can be attached to an instance.
pub(super) fn is_reachable(at: &Location, instance: &Instance) -> bool {
    let same = |left: &str, right: &Option<String>| {
        right.as_deref().is_some_and(|right| left.eq_ignore_ascii_case(right))
    };
    same(&at.backend, &instance.backend)
        && (same(&at.region, &instance.region) || at.region.is_empty())
        && (at.zone.is_none()
            || instance.availability_zone.is_none()
            || at.zone.as_deref().is_some_and(|zone| same(zone, &instance.availability_zone)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use uuid::Uuid;
    use windlass_model::{
        id::{UserId, VolumeId},
        time::Timestamp,
    };

    use super::*;

    fn volume(name: &str, backend: &str, region: &str) -> Volume {
        let configuration =
            json!({"type": "volume", "name": name, "backend": backend, "region": region, "size": 10});
        Volume {
            id: VolumeId(Uuid::nil()),
            project_id: ProjectId(Uuid::nil()),
            user_id: UserId(Uuid::nil()),
            name: name.to_owned(),
            configuration: configuration.to_string(),
            external: false,
            status: Status::Active,
            finished: false,
            status_message: None,
            volume_id: Some("disk".to_owned()),
            provisioning: None,
            delete_asked_at: None,
            last_job_processed_at: None,
            created_at: Timestamp(0),
            last_processed_at: Timestamp(0),
            deleted: false,
            deleted_at: None,
            tracking: None,
            lock_epoch: 0,
        }
    }

    fn catalogue() -> VolumeCatalog {
        let young = Volume { status: Status::Provisioning, ..volume("young", "mock", "here") };
        let all = [
            volume("aa", "mock", "here"),
            volume("bb", "mock", "here"),
            volume("cc", "mock", "there"),
            volume("shared", "runpod", "here"),
            young,
        ];
        VolumeCatalog(all.map(|volume| (volume.name.clone(), volume)).into())
    }

    fn mounts(documents: serde_json::Value) -> Vec<VolumeMount> {
        let mounts: Vec<Mount> = serde_json::from_value(documents).unwrap();
        network_mounts(Some(&mounts))
    }

    /// Message for a run with these jobs.
    fn check_message(jobs: &[serde_json::Value]) -> Option<String> {
        let jobs: Vec<_> = jobs.iter().cloned().map(mounts).collect();
        catalogue().refuse(&jobs, |backend| backend == "runpod").unwrap()
    }

    #[test]
    fn compatible_volumes_are_accepted() {
        assert_eq!(check_message(&[]), None);
        assert_eq!(check_message(&[json!(["/host:/data"])]), None);
        assert_eq!(check_message(&[json!(["aa:/x", "bb:/y", "/host:/data"])]), None);
        assert_eq!(check_message(&[json!([{"name": ["aa", "cc"], "path": "/x"}])]), None);
        assert_eq!(check_message(&[json!(["aa:/x"]), json!(["bb:/x"])]), None);
        assert_eq!(check_message(&[json!(["shared:/x"]), json!(["shared:/x"])]), None);
    }

    #[test]
    fn unmountable_volumes_are_refused_with_the_reason() {
        for (jobs, expected) in [
            (vec![json!(["nothing:/x"])], "`nothing` does not exist"),
            (vec![json!(["young:/x"])], "`young` is not ready yet"),
            (vec![json!(["aa:/x", "aa:/y"])], "`aa` is mounted twice"),
            (vec![json!(["aa:/x", "cc:/y"])], "in mock/here, those at `/y` in mock/there"),
            (vec![json!(["aa:/x"]), json!(["aa:/x"])], "mounted by two jobs"),
        ] {
            let message = check_message(&jobs).unwrap_or_default();
            assert!(message.contains(expected), "{jobs:?}: {message}");
        }
    }

    #[test]
    fn placement_receives_the_locations_of_usable_volumes() {
        let wanted = mounts(json!([{"name": ["young", "cc", "aa"], "path": "/x"}]));
        let at = |region: &str| Location { backend: "mock".into(), region: region.into(), zone: None };
        assert_eq!(catalogue().locations(&wanted).unwrap(), [[at("there"), at("here")]]);
        let young = mounts(json!(["young:/x"]));
        assert_eq!(catalogue().locations(&young).unwrap(), [Vec::new()]);
        assert!(catalogue().problem(&young).is_some() && catalogue().problem(&wanted).is_none());
    }
}
