//! Initial environment of a task: clean, marked, and with only its own GPUs visible.

use std::ffi::OsString;

use windlass_model::id::SubmissionId;

use crate::host::gpu::{Gpu, Vendor};

const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Returns the two variables that mark a process as part of a task of this shim. A job can drop them, so they are the
/// last resort where there are no control groups.
pub(super) fn task_marks(home_id: &str, task: SubmissionId) -> [(String, String); 2] {
    [("WINDLASS_TASK_ID".to_owned(), task.to_string()), ("WINDLASS_HOME_ID".to_owned(), home_id.to_owned())]
}

/// Returns the variables in order; later ones take precedence. Additions of the host precede the marks and the GPUs.
pub(super) fn variables(
    home: Option<OsString>,
    added: &[(String, String)],
    marks: &[(String, String)],
    gpus: &[Gpu],
) -> Vec<(String, OsString)> {
    let mut variables = vec![
        ("PATH".to_owned(), PATH.into()),
        ("HOME".to_owned(), home.unwrap_or_else(|| "/".into())),
        ("LANG".to_owned(), "C.UTF-8".into()),
    ];
    variables.extend(added.iter().chain(marks).map(|(name, value)| (name.clone(), value.into())));
    variables.extend(visible_gpus(gpus).into_iter().map(|(name, value)| (name.to_owned(), value.into())));
    variables
}

/// Returns the variables that select the visible GPUs for each vendor's libraries. Without GPUs, none is visible.
fn visible_gpus(gpus: &[Gpu]) -> Vec<(&'static str, String)> {
    let of = |vendor: Vendor, say: fn(&Gpu) -> String| {
        gpus.iter().filter(|gpu| gpu.vendor == vendor).map(say).collect::<Vec<_>>().join(",")
    };
    let nvidia = ("CUDA_VISIBLE_DEVICES", of(Vendor::Nvidia, |gpu| gpu.id.clone()));
    let by_index: fn(&Gpu) -> String = |gpu| gpu.index.to_string();
    let amd = ("ROCR_VISIBLE_DEVICES", of(Vendor::Amd, by_index));
    match gpus.first().map(|gpu| gpu.vendor) {
        // AMD's libraries also obey CUDA's variable.
        None => vec![nvidia, amd],
        Some(Vendor::Nvidia) => vec![nvidia],
        // HIP's variable indexes the devices that ROCR exposes: setting both would hide the intended ones.
        Some(Vendor::Amd) => vec![amd],
        Some(Vendor::Intel) => vec![("HABANA_VISIBLE_DEVICES", of(Vendor::Intel, by_index))],
        Some(Vendor::Tenstorrent) => vec![("TT_VISIBLE_DEVICES", of(Vendor::Tenstorrent, by_index))],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(vendor: Vendor, index: u32) -> Gpu {
        Gpu {
            vendor,
            id: format!("GPU-{index}"),
            index,
            name: "G".to_owned(),
            memory_mib: 1,
            compute_capability: None,
            devices: Vec::new(),
        }
    }

    #[track_caller]
    fn check(gpus: &[Gpu], expected: &[(&str, &str)]) {
        let seen = visible_gpus(gpus);
        let seen: Vec<(&str, &str)> = seen.iter().map(|(name, value)| (*name, value.as_str())).collect();
        assert_eq!(seen, expected);
    }

    #[test]
    fn exactly_the_allocated_gpus_are_visible() {
        check(&[], &[("CUDA_VISIBLE_DEVICES", ""), ("ROCR_VISIBLE_DEVICES", "")]);
        check(&[gpu(Vendor::Nvidia, 3), gpu(Vendor::Nvidia, 1)], &[("CUDA_VISIBLE_DEVICES", "GPU-3,GPU-1")]);
        check(&[gpu(Vendor::Amd, 2)], &[("ROCR_VISIBLE_DEVICES", "2")]);
        check(&[gpu(Vendor::Intel, 0)], &[("HABANA_VISIBLE_DEVICES", "0")]);
        check(&[gpu(Vendor::Tenstorrent, 1)], &[("TT_VISIBLE_DEVICES", "1")]);
    }

    #[test]
    fn variables_added_by_the_host_cannot_override_the_task_id() {
        let added = [("WINDLASS_TASK_ID".to_owned(), "other".to_owned())];
        let task = SubmissionId(uuid::Uuid::from_u128(7));
        let all = variables(None, &added, &task_marks("h", task), &[]);
        let last = all.iter().rfind(|(name, _)| name == "WINDLASS_TASK_ID").unwrap();
        assert_eq!(last.1, task.to_string().as_str());
    }
}
