//! Resources in words: `8 × H100 80 GB, 96 CPU, 1 TB`.

use serde_json::Value;

/// Resources of a job or an instance.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct ResourceWords {
    pub(super) words: String,
    pub(super) gpu: Option<String>,
    /// Per node.
    pub(super) gpus: i64,
}

fn lower_bound(range: &Value) -> Option<f64> {
    range.as_f64().or_else(|| range["min"].as_f64()).or_else(|| range["max"].as_f64())
}

fn number(value: f64) -> String {
    if value.fract() == 0.0 { format!("{value:.0}") } else { format!("{value:.1}") }
}

fn gigabytes(value: f64) -> String {
    if value >= 1024.0 { format!("{} TB", number(value / 1024.0)) } else { format!("{} GB", number(value)) }
}

fn join(gpu: Option<String>, cpus: Option<f64>, memory: Option<f64>) -> String {
    let mut parts: Vec<String> = gpu.into_iter().collect();
    parts.extend(cpus.map(|cpus| format!("{} CPU", number(cpus))));
    parts.extend(memory.map(gigabytes));
    if parts.is_empty() { "any".to_owned() } else { parts.join(", ") }
}

fn format_gpu(count: i64, name: Option<&str>, memory: Option<f64>) -> Option<String> {
    if count == 0 {
        return None;
    }
    let mut text = format!("{count} × {}", name.unwrap_or("GPU"));
    if let Some(memory) = memory.filter(|memory| *memory > 0.0) {
        text.push(' ');
        text.push_str(&gigabytes(memory));
    }
    Some(text)
}

/// Resources that a job requests: `requirements.resources` of its specification.
pub(super) fn requested(resources: &Value) -> ResourceWords {
    let gpu = &resources["gpu"];
    let name = gpu["name"][0].as_str().map(str::to_owned);
    #[expect(clippy::cast_possible_truncation, reason = "a number of GPUs")]
    let count = lower_bound(&gpu["count"]).unwrap_or(0.0) as i64;
    let count = if count == 0 && name.is_some() { 1 } else { count };
    let words = join(
        format_gpu(count, name.as_deref(), lower_bound(&gpu["memory"])),
        lower_bound(&resources["cpu"]["count"]),
        lower_bound(&resources["memory"]),
    );
    ResourceWords { words, gpu: name.filter(|_| count > 0), gpus: count }
}

/// Resources that a job requests, in words.
pub(crate) fn requested_resources(resources: &Value) -> String {
    requested(resources).words
}

/// Resources of an instance: `resources` of its type. Returns its CPUs and its memory in MiB as well.
pub(super) fn installed(resources: &Value) -> (ResourceWords, i64, i64) {
    let gpus = resources["gpus"].as_array().map(Vec::as_slice).unwrap_or_default();
    let name = gpus.first().and_then(|gpu| gpu["name"].as_str()).map(str::to_owned);
    let memory = gpus.first().and_then(|gpu| gpu["memory_mib"].as_f64()).map(|mib| (mib / 1024.0).round());
    let count = i64::try_from(gpus.len()).unwrap_or(0);
    let (cpus, mib) =
        (resources["cpus"].as_i64().unwrap_or(0), resources["memory_mib"].as_i64().unwrap_or(0));
    let rounded = resources["memory_mib"].as_f64().map(|mib| (mib / 1024.0).round().max(1.0));
    let words = join(format_gpu(count, name.as_deref(), memory), resources["cpus"].as_f64(), rounded);
    (ResourceWords { words, gpu: name, gpus: count }, cpus, mib)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn resources_are_described_with_gpus_first() {
        let all = json!({
            "cpu": {"count": {"min": 96}}, "memory": {"min": 1024.0, "max": null},
            "gpu": {"name": ["H100"], "count": {"min": 8, "max": 8}, "memory": {"min": 80.0}},
        });
        let words = requested(&all);
        assert_eq!(words.words, "8 × H100 80 GB, 96 CPU, 1 TB");
        assert_eq!((words.gpu.as_deref(), words.gpus), (Some("H100"), 8));
        let plain =
            json!({"cpu": {"count": {"min": 2}}, "memory": {"min": 0.5}, "gpu": {"count": {"min": 0}}});
        assert_eq!(requested(&plain), ResourceWords { words: "2 CPU, 0.5 GB".into(), gpu: None, gpus: 0 });
        assert_eq!(requested(&json!({})).words, "any");
        let host = json!({"cpus": 4, "memory_mib": 15_900, "gpus": [{"name": "T4", "memory_mib": 15_360}]});
        let (words, cpus, memory) = installed(&host);
        assert_eq!((words.words.as_str(), cpus, memory), ("1 × T4 15 GB, 4 CPU, 16 GB", 4, 15_900));
    }
}
