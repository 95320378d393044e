//! Progress of a pull: sums up the engine's reports about single layers. Pure.

use std::collections::BTreeMap;

use windlass_api::agent::shim::PullProgress;

/// More layers than any engine accepts; further layers are not counted.
const LAYERS_MAX: usize = 1024;

#[derive(Debug, Default)]
pub(super) struct PullLayers {
    layers: BTreeMap<String, Layer>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Layer {
    stage: LayerStage,
    total: u64,
    downloaded: u64,
    extracted: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum LayerStage {
    /// Named; the size is not yet known.
    #[default]
    Announced,
    Downloading,
    Downloaded,
    Extracting,
    Done,
}

/// One progress line of the engine about one layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct ProgressLine<'a> {
    pub(super) layer: &'a str,
    pub(super) status: &'a str,
    pub(super) current: Option<u64>,
    pub(super) total: Option<u64>,
}

impl PullLayers {
    /// Applies a line. Returns true if there was progress: only that counts as activity, since an engine that retries
    /// reports so every second without receiving a byte.
    pub(super) fn note(&mut self, line: ProgressLine<'_>) -> bool {
        let Some(stage) = parse_stage(line.status) else { return false };
        if self.layers.len() >= LAYERS_MAX && !self.layers.contains_key(line.layer) {
            return false;
        }
        let new = !self.layers.contains_key(line.layer);
        let layer = self.layers.entry(line.layer.to_owned()).or_default();
        let before = layer.clone();
        // A broken download starts again, so the stage may return to downloading.
        if stage > layer.stage || stage == LayerStage::Downloading {
            layer.stage = stage;
        }
        if let Some(total) = line.total.filter(|total| *total > 0) {
            layer.total = total;
        }
        match stage {
            LayerStage::Announced => {}
            LayerStage::Downloading => layer.downloaded = line.current.unwrap_or(layer.downloaded),
            LayerStage::Downloaded => layer.downloaded = layer.total,
            LayerStage::Extracting => {
                layer.downloaded = layer.total;
                layer.extracted = line.current.unwrap_or(layer.extracted);
            }
            LayerStage::Done => {
                layer.downloaded = layer.total;
                layer.extracted = layer.total;
            }
        }
        new || *layer != before
    }

    pub(super) fn totals(&self) -> PullProgress {
        let add = |field: fn(&Layer) -> u64| self.layers.values().map(field).sum();
        PullProgress {
            downloaded_bytes: add(|layer| layer.downloaded),
            extracted_bytes: add(|layer| layer.extracted),
            total_bytes: add(|layer| layer.total),
            is_total_bytes_final: !self.layers.is_empty()
                && self.layers.values().all(|layer| layer.stage != LayerStage::Announced),
        }
    }
}

/// Returns `None` for lines that do not report the stage of a layer.
fn parse_stage(status: &str) -> Option<LayerStage> {
    Some(match status {
        "Pulling fs layer" | "Waiting" => LayerStage::Announced,
        "Downloading" => LayerStage::Downloading,
        "Verifying Checksum" | "Download complete" => LayerStage::Downloaded,
        "Extracting" => LayerStage::Extracting,
        "Pull complete" | "Already exists" => LayerStage::Done,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line<'a>(layer: &'a str, status: &'a str, numbers: Option<(u64, u64)>) -> ProgressLine<'a> {
        let (current, total) = numbers.unzip();
        ProgressLine { layer, status, current, total }
    }

    fn sum(layers: &PullLayers) -> (u64, u64, u64, bool) {
        let sum = layers.totals();
        (sum.downloaded_bytes, sum.extracted_bytes, sum.total_bytes, sum.is_total_bytes_final)
    }

    #[test]
    fn pull_progress_is_the_sum_of_all_layers() {
        let mut layers = PullLayers::default();
        assert_eq!(sum(&layers), (0, 0, 0, false));
        layers.note(line("a", "Pulling fs layer", None));
        layers.note(line("b", "Pulling fs layer", None));
        layers.note(line("c", "Already exists", None));
        assert_eq!(sum(&layers), (0, 0, 0, false));
        layers.note(line("a", "Downloading", Some((10, 100))));
        assert_eq!(sum(&layers), (10, 0, 100, false), "the size of b is not known");
        layers.note(line("b", "Downloading", Some((5, 50))));
        layers.note(line("a", "Download complete", None));
        assert_eq!(sum(&layers), (105, 0, 150, true));
        layers.note(line("a", "Extracting", Some((60, 100))));
        layers.note(line("b", "Pull complete", None));
        assert_eq!(sum(&layers), (150, 110, 150, true));
        layers.note(line("a", "Pull complete", None));
        assert_eq!(sum(&layers), (150, 150, 150, true));
    }

    #[test]
    fn only_an_advancing_layer_counts_as_progress() {
        let mut layers = PullLayers::default();
        assert!(layers.note(line("a", "Downloading", Some((1, 9)))));
        assert!(!layers.note(line("a", "Downloading", Some((1, 9)))));
        assert!(!layers.note(line("a", "Retrying in 5 seconds", None)));
        assert!(layers.note(line("a", "Downloading", Some((2, 9)))));
        assert!(
            layers.note(line("a", "Downloading", Some((0, 9)))),
            "a download that starts again moves too"
        );
        assert!(layers.note(line("a", "Verifying Checksum", None)));
        assert!(!layers.note(line("a", "Download complete", None)));
    }

    #[test]
    fn a_layer_too_small_to_report_its_size_does_not_block_the_total() {
        let mut layers = PullLayers::default();
        layers.note(line("a", "Pulling fs layer", None));
        layers.note(line("a", "Download complete", None));
        assert_eq!(sum(&layers), (0, 0, 0, true));
    }
}
