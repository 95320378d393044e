//! GPU names: normalises the names that drivers, Kubernetes labels, Slurm, clouds and users have for a device.
//!
//! `NVIDIA A100-SXM4-80GB`, `nvidia_a100_sxm4_80gb`, `Tesla-A100` and `a100-80gb` are all an `A100`. A name has a base
//! (`A100`), and optionally a form (`SXM`), a memory size (`80GB`) and a part (`MIG-3g.20gb`). A request may omit all
//! but the base; the parts that it names must match. A device that is not in the [catalogue](catalogue) keeps its name,
//! and is found by it.

mod catalogue;

use crate::resources::GpuVendor;

pub use catalogue::{CatalogueModel, MODELS};

const MIB_PER_GB: u64 = 1024;
/// Memory sizes on the market, for devices that are not in the catalogue.
const USUAL_GB: [u32; 26] =
    [2, 3, 4, 6, 8, 10, 11, 12, 16, 20, 24, 32, 36, 40, 48, 64, 72, 80, 94, 96, 128, 141, 180, 192, 256, 288];
/// Maximum difference between a driver's figure and the nominal size, in percent. A T4 reports 15 of its 16 GB.
const TOLERANCE_PERCENT: u64 = 8;

/// Form factor of a device. The same GPU is sold in several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FormFactor {
    Sxm,
    Pcie,
    Nvl,
    Oam,
}

impl FormFactor {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Sxm => "SXM",
            Self::Pcie => "PCIe",
            Self::Nvl => "NVL",
            Self::Oam => "OAM",
        }
    }

    fn parse(token: &str) -> Option<Self> {
        match token {
            "pcie" => Some(Self::Pcie),
            "nvl" => Some(Self::Nvl),
            "oam" => Some(Self::Oam),
            _ => {
                let number = token.strip_prefix("sxm")?;
                number.bytes().all(|byte| byte.is_ascii_digit()).then_some(Self::Sxm)
            }
        }
    }
}

/// Parts of a name, whatever its source.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ParsedName {
    /// Lower case letters and digits, without vendor, form and memory: `a100`, `rtx6000ada`.
    base: String,
    model: Option<&'static CatalogueModel>,
    form: Option<FormFactor>,
    memory_gb: Option<u32>,
    /// Profile of a part of a GPU: `3g.20gb`.
    part: Option<String>,
}

/// Words that name the vendor, or carry no information.
const IGNORED_WORDS: [&str; 34] = [
    "nvidia",
    "amd",
    "intel",
    "habana",
    "labs",
    "tenstorrent",
    "google",
    "tesla",
    "quadro",
    "geforce",
    "instinct",
    "radeon",
    "corporation",
    "inc",
    "graphics",
    "gpu",
    "generation",
    "edition",
    "workstation",
    "server",
    "maxq",
    "blackwell",
    "accelerator",
    "mega",
    "display",
    "hbm2",
    "hbm2e",
    "hbm3",
    "hbm3e",
    "ls",
    "ac",
    "tt",
    "r",
    "tm",
];

fn parse_name(text: &str) -> ParsedName {
    let lower = text.to_ascii_lowercase();
    let mut reading =
        ParsedName { base: String::new(), model: None, form: None, memory_gb: None, part: None };
    // A profile contains a dot, which separates the parts of other names.
    let tokens =
        lower.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '.' && letter != '+');
    let mut tokens = tokens.filter(|token| !token.is_empty()).peekable();
    let mut is_hbm3 = false;
    let mut first = None;
    let mut numbers = Vec::new();
    while let Some(token) = tokens.next() {
        if token == "mig" {
            continue;
        }
        if is_profile(token) {
            reading.part = Some(token.to_owned());
        } else if let Some(form) = FormFactor::parse(token) {
            reading.form = Some(form);
        } else if let Some(gigabytes) = parse_memory_gb(token) {
            reading.memory_gb = Some(gigabytes);
        } else if token == "max" && tokens.peek() == Some(&"q") {
            tokens.next();
        } else if IGNORED_WORDS.contains(&token) {
            is_hbm3 |= token == "hbm3";
        } else {
            first.get_or_insert(token);
            reading.base.push_str(token);
            numbers.extend(token.parse::<u32>());
        }
    }
    reading.model = catalogue::find_model(&reading.base);
    if reading.model.is_none() {
        // `H100NVL`: name and form without a separator.
        let in_one = |form: FormFactor| {
            let base = reading.base.strip_suffix(&*form.as_str().to_ascii_lowercase())?;
            catalogue::find_model(base).map(|model| (model, form))
        };
        if let Some((model, form)) =
            [FormFactor::Nvl, FormFactor::Sxm, FormFactor::Pcie, FormFactor::Oam].into_iter().find_map(in_one)
        {
            (reading.model, reading.form) = (Some(model), Some(form));
        }
    }
    if reading.model.is_none()
        // `A100-PG509-200`: a name with the vendor's part number after it.
        && let Some(model) = first.and_then(catalogue::find_model).filter(|model| model.name.len() >= 4)
    {
        model.name.to_ascii_lowercase().clone_into(&mut reading.base);
        reading.model = Some(model);
        // `a100-40`, as cluster administrators write it.
        let size = numbers.into_iter().find(|number| model.memory_gb.contains(number));
        reading.memory_gb = reading.memory_gb.or(size);
    }
    // The figure in `GH200 480GB` is the memory of the CPU next to it.
    if reading.model.is_some_and(|model| model.name == "GH200" && reading.memory_gb == Some(480)) {
        reading.memory_gb = None;
    }
    // The driver identifies this board only by its memory type.
    if is_hbm3 && reading.form.is_none() && reading.model.is_some_and(|model| model.name == "H100") {
        reading.form = Some(FormFactor::Sxm);
    }
    reading
}

/// Parses a compute capability as drivers write it: `9.0`.
pub fn compute_capability(text: &str) -> Option<(u32, u32)> {
    let (major, minor) = text.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Parses a memory size such as `80gb` or `144g`.
fn parse_memory_gb(token: &str) -> Option<u32> {
    let digits = token.strip_suffix("gb").or_else(|| token.strip_suffix('g'))?;
    digits.parse().ok().filter(|gigabytes| *gigabytes >= 2)
}

/// Returns whether the token is a profile such as `3g.20gb` or `1g.5gb+me`.
fn is_profile(token: &str) -> bool {
    let Some((slices, memory)) = token.split_once("g.") else { return false };
    let memory = memory.split('+').next().unwrap_or_default();
    slices.parse::<u32>().is_ok() && memory.strip_suffix("gb").is_some_and(|size| size.parse::<u32>().is_ok())
}

/// A device with its normalised name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// `H100`, `A100-SXM`, `H100-NVL`, `A100-MIG-3g.20gb`; the driver's name if the device is unknown.
    pub name: String,
    pub vendor: Option<GpuVendor>,
    /// Nominal memory, which is what requests use: a driver that reports 143,771 MiB means 141 GB.
    pub memory_mib: Option<u64>,
    pub compute_capability: Option<(u32, u32)>,
}

/// Returns the device of this name, with the memory that its driver reports, if known.
pub fn identify_device(name: &str, memory_mib: Option<u64>) -> Device {
    let reading = parse_name(name);
    let vendor = vendor_of(name);
    let Some(model) = reading.model else {
        return Device {
            name: name.trim().to_owned(),
            vendor,
            memory_mib: memory_mib.map(|mib| nominal_memory(mib, &USUAL_GB)),
            compute_capability: None,
        };
    };
    let mut known = model.name.to_owned();
    if let Some(form) = reading.form {
        known = format!("{known}-{}", form.as_str());
    }
    let sold = match (memory_mib, reading.memory_gb, model.memory_gb) {
        (Some(mib), _, sizes) => Some(nominal_memory(mib, sizes)),
        (None, Some(gigabytes), sizes) if sizes.contains(&gigabytes) => {
            Some(u64::from(gigabytes) * MIB_PER_GB)
        }
        (None, _, [only]) => Some(u64::from(*only) * MIB_PER_GB),
        (None, _, _) => None,
    };
    let (name, memory_mib) = match &reading.part {
        Some(profile) => (format!("{known}-MIG-{profile}"), memory_mib.or_else(|| profile_mib(profile))),
        None => (known, sold),
    };
    Device { name, vendor: Some(model.vendor), memory_mib, compute_capability: model.compute_capability }
}

/// Returns the memory in a profile's name.
fn profile_mib(profile: &str) -> Option<u64> {
    let size = profile.split_once("g.")?.1.split('+').next()?.strip_suffix("gb")?;
    Some(size.parse::<u64>().ok()? * MIB_PER_GB)
}

/// Returns the nominal memory of a device whose driver reports `mib`: the nearest size within the tolerance, or `mib`.
fn nominal_memory(mib: u64, sizes: &[u32]) -> u64 {
    let sold = |gigabytes: &u32| u64::from(*gigabytes) * MIB_PER_GB;
    let nearest = sizes.iter().map(sold).min_by_key(|sold| sold.abs_diff(mib));
    nearest.filter(|sold| sold.abs_diff(mib) * 100 <= sold * TOLERANCE_PERCENT).unwrap_or(mib)
}

/// Returns whether `wanted` matches a device of this name and memory. All parts of the request must match; a form is
/// assumed to match if the device's name has none.
pub fn matches_request(wanted: &str, name: &str, memory_mib: u64) -> bool {
    if wanted.eq_ignore_ascii_case(name) {
        return true;
    }
    let (wanted, has) = (parse_name(wanted), parse_name(name));
    let same_base = match (wanted.model, has.model) {
        (Some(wanted), Some(has)) => std::ptr::eq(wanted, has),
        (None, None) => wanted.base == has.base,
        (Some(_), None) | (None, Some(_)) => false,
    };
    let form_fits = match (wanted.form, has.form) {
        (None, _) => true,
        (Some(wanted), Some(has)) => wanted == has,
        (Some(form), None) => form != FormFactor::Nvl,
    };
    // A part of a GPU does not match the whole GPU.
    let part_fits = wanted.part == has.part;
    let memory_fits = wanted.memory_gb.is_none_or(|gigabytes| {
        has.part.is_some() || memory_mib == 0 || matches_memory(memory_mib, u64::from(gigabytes) * MIB_PER_GB)
    });
    same_base && form_fits && part_fits && memory_fits
}

/// Returns whether the memory matches the requested nominal size within half the tolerance.
fn matches_memory(mib: u64, wanted: u64) -> bool {
    mib.abs_diff(wanted) * 100 <= wanted * TOLERANCE_PERCENT / 2
}

/// Returns the vendor of a GPU of this name, if it is well known.
pub fn vendor_of(name: &str) -> Option<GpuVendor> {
    if let Some(model) = parse_name(name).model {
        return Some(model.vendor);
    }
    let name = name.to_ascii_lowercase();
    let message =
        |word: &str| name.split(|letter: char| !letter.is_ascii_alphanumeric()).any(|part| part == word);
    let starts = |prefixes: &[&str]| prefixes.iter().any(|prefix| name.starts_with(prefix));
    if message("nvidia") || message("tesla") || message("geforce") || starts(&["rtx", "gtx", "quadro"]) {
        Some(GpuVendor::Nvidia)
    } else if message("amd") || message("radeon") || message("instinct") {
        Some(GpuVendor::Amd)
    } else if message("intel") || message("habana") || starts(&["gaudi"]) {
        Some(GpuVendor::Intel)
    } else if message("tenstorrent") || starts(&["tt-", "wormhole", "blackhole", "grayskull"]) {
        Some(GpuVendor::Tenstorrent)
    } else if starts(&["v5litepod", "v5p", "v5e", "v6e", "v2-", "v3-", "v4-", "tpu"]) {
        Some(GpuVendor::Google)
    } else {
        None
    }
}
