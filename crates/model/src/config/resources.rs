//! Parsing of resource requests: `H100:80GB:8`, `arm:4..`, `16GB..`.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};

use super::{
    config_macros::deserialize_by_decoding,
    decode::{Ctx, Decode, check_keys, decode_word, excerpt, expect_map, is_map, optional_field, text},
    quantities::{MemorySize, parse_range},
    schema::{any_of, default, describe, subschema},
    yaml::{Node, Value},
};
use crate::resources::{CpuArch, CpuSpec, DiskSpec, Gb, GpuSpec, GpuVendor, Range, ResourcesSpec};

impl CpuArch {
    pub fn parse(word: &str) -> Option<Self> {
        match word.to_ascii_lowercase().as_str() {
            "x86" => Some(Self::X86),
            "arm" => Some(Self::Arm),
            _ => None,
        }
    }
}

impl GpuVendor {
    pub const WORDS: [&'static str; 7] = ["nvidia", "amd", "google", "tpu", "intel", "tenstorrent", "tt"];

    pub fn parse(word: &str) -> Option<Self> {
        match word.to_ascii_lowercase().as_str() {
            "nvidia" => Some(Self::Nvidia),
            "amd" => Some(Self::Amd),
            "google" | "tpu" => Some(Self::Google),
            "intel" => Some(Self::Intel),
            "tenstorrent" | "tt" => Some(Self::Tenstorrent),
            _ => None,
        }
    }
}

impl Decode for CpuArch {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        decode_word(node, cx, &["x86", "arm"], Self::parse)
    }
}

impl Decode for GpuVendor {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        decode_word(node, cx, &Self::WORDS, Self::parse)
    }
}

/// Parses `8`, `4..8`, `arm:4..`, `x86`.
pub fn parse_cpu(text: &str) -> Result<CpuSpec, String> {
    let mut spec = CpuSpec::default();
    let (mut arch, mut count) = (false, false);
    for token in text.split(':').map(str::trim) {
        if token.is_empty() {
            return Err("empty part between colons".to_owned());
        }
        if token.starts_with(|c: char| c.is_ascii_alphabetic()) {
            let known = CpuArch::parse(token)
                .ok_or_else(|| format!("unknown CPU architecture `{}`", excerpt(token)))?;
            if std::mem::replace(&mut arch, true) {
                return Err("the architecture is specified twice".to_owned());
            }
            spec.arch = Some(known);
        } else {
            if std::mem::replace(&mut count, true) {
                return Err("the count is specified twice".to_owned());
            }
            spec.count = parse_range(token)?;
        }
    }
    Ok(spec)
}

impl Decode for CpuSpec {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        if !is_map(node) {
            return match parse_cpu(text(node, cx)?) {
                Ok(spec) => Some(spec),
                Err(reason) => cx.invalid(node, reason),
            };
        }
        if node.entry("min").is_some() || node.entry("max").is_some() {
            return Range::decode(node, cx).map(|count| Self { arch: None, count });
        }
        check_keys(node, &["arch", "count"], cx);
        let arch = optional_field(node, "arch", cx, || None);
        let count = optional_field(node, "count", cx, || Self::default().count);
        Some(Self { arch: arch?, count: count? })
    }
}

/// Parses colon-separated parts in any order: vendor, names, memory, count.
pub fn parse_gpu(text: &str) -> Result<GpuSpec, String> {
    let mut spec = GpuSpec::count(Range::at_least(1));
    let (mut vendor, mut count) = (false, false);
    for token in text.split(':').map(str::trim) {
        if token.is_empty() {
            return Err("empty part between colons".to_owned());
        }
        if let Some(known) = GpuVendor::parse(token) {
            if std::mem::replace(&mut vendor, true) {
                return Err("the vendor is specified twice".to_owned());
            }
            spec.vendor = Some(known);
        } else if token.starts_with(|c: char| c.is_ascii_alphabetic()) {
            if spec.name.is_some() {
                return Err("names are specified twice; use a list: `A100,H100`".to_owned());
            }
            spec.name = Some(split_names(token)?);
        } else if token.contains(|c: char| c.is_ascii_alphabetic()) {
            if spec.memory.is_some() {
                return Err("the memory is specified twice".to_owned());
            }
            spec.memory = Some(parse_range::<Gb>(token).map_err(|reason| match normalize_count(token) {
                Some(meant) => format!("{reason}; did you mean `{meant}`?"),
                None => reason,
            })?);
        } else {
            if std::mem::replace(&mut count, true) {
                return Err("the count is specified twice; memory requires a unit, such as `80GB`".to_owned());
            }
            spec.count = parse_range(token)?;
        }
    }
    extract_tpu_vendor(&mut spec)?;
    Ok(spec)
}

/// Converts `8xH100`, as other tools write it, to `H100:8`.
fn normalize_count(token: &str) -> Option<String> {
    let (count, name) = token.split_once(['x', 'X'])?;
    let is_count = !count.is_empty() && count.bytes().all(|b| b.is_ascii_digit());
    (is_count && name.starts_with(|c: char| c.is_ascii_alphabetic())).then(|| format!("{name}:{count}"))
}

fn split_names(text: &str) -> Result<Vec<String>, String> {
    let names: Vec<_> = text.split(',').map(|name| name.trim().to_owned()).collect();
    if names.iter().any(String::is_empty) {
        return Err(format!("empty name in `{}`", excerpt(text)));
    }
    Ok(names)
}

/// Extracts the vendor from the old spelling `tpu-v5litepod-8`, which contains it in the name.
fn extract_tpu_vendor(spec: &mut GpuSpec) -> Result<(), String> {
    let Some(names) = &mut spec.name else { return Ok(()) };
    for name in names {
        if let Some(rest) = name.strip_prefix("tpu-") {
            if rest.is_empty() {
                return Err("`tpu-` is not a GPU name".to_owned());
            }
            *name = rest.to_owned();
            spec.vendor.get_or_insert(GpuVendor::Google);
        }
    }
    Ok(())
}

/// A list of GPU names: `[A100, H100]` or `A100,H100`.
struct GpuNames(Vec<String>);

impl Decode for GpuNames {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        if matches!(node.value, Value::Seq(_)) {
            return Vec::decode(node, cx).map(Self);
        }
        match split_names(text(node, cx)?) {
            Ok(names) => Some(Self(names)),
            Err(reason) => cx.invalid(node, reason),
        }
    }
}

/// A compute capability: `7.5` or `[7, 5]`.
struct ComputeCapability(u32, u32);

impl Decode for ComputeCapability {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        if matches!(node.value, Value::Seq(_)) {
            return match Vec::<u32>::decode(node, cx)?.as_slice() {
                [major, minor] => Some(Self(*major, *minor)),
                _ => cx.invalid(node, "expected two numbers, such as [7, 5]"),
            };
        }
        let text = text(node, cx)?;
        let (major, minor) = text.split_once('.').unwrap_or((text, "0"));
        match (major.parse(), minor.parse()) {
            (Ok(major), Ok(minor)) => Some(Self(major, minor)),
            (Ok(_) | Err(_), _) => {
                cx.invalid(node, format!("`{}` is not a version such as 7.5", excerpt(text)))
            }
        }
    }
}

const GPU_KEYS: [&str; 6] = ["vendor", "name", "count", "memory", "total_memory", "compute_capability"];

impl Decode for GpuSpec {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        if !is_map(node) {
            return match parse_gpu(text(node, cx)?) {
                Ok(spec) => Some(spec),
                Err(reason) => cx.invalid(node, reason),
            };
        }
        check_keys(node, &GPU_KEYS, cx);
        let vendor = optional_field(node, "vendor", cx, || None);
        let name: Option<Option<GpuNames>> = optional_field(node, "name", cx, || None);
        let count = optional_field(node, "count", cx, || Range::at_least(1));
        let memory = optional_field(node, "memory", cx, || None);
        let total_memory = optional_field(node, "total_memory", cx, || None);
        let capability: Option<Option<ComputeCapability>> =
            optional_field(node, "compute_capability", cx, || None);
        let mut spec = Self {
            vendor: vendor?,
            name: name?.map(|names| names.0),
            count: count?,
            memory: memory?,
            total_memory: total_memory?,
            compute_capability: capability?.map(|ComputeCapability(major, minor)| (major, minor)),
        };
        match extract_tpu_vendor(&mut spec) {
            Ok(()) => Some(spec),
            Err(reason) => cx.invalid(node, reason),
        }
    }
}

impl Decode for DiskSpec {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        if node.entry("min").is_some() || node.entry("max").is_some() || !is_map(node) {
            return Range::decode(node, cx).map(|size| Self { size });
        }
        check_keys(node, &["size"], cx);
        super::decode::required_field(node, "size", cx).map(|size| Self { size })
    }
}

const RESOURCES_KEYS: [&str; 5] = ["cpu", "memory", "shm_size", "gpu", "disk"];

impl Decode for ResourcesSpec {
    fn decode(node: &Node, cx: &mut Ctx) -> Option<Self> {
        expect_map(node, cx)?;
        check_keys(node, &RESOURCES_KEYS, cx);
        let usual = Self::default();
        let cpu = optional_field(node, "cpu", cx, || usual.cpu);
        let memory = optional_field(node, "memory", cx, || usual.memory);
        let shm_size: Option<Option<MemorySize>> = optional_field(node, "shm_size", cx, || None);
        let gpu = optional_field(node, "gpu", cx, || usual.gpu);
        let disk = optional_field(node, "disk", cx, || usual.disk);
        Some(Self {
            cpu: cpu?,
            memory: memory?,
            shm_size: shm_size?.map(|memory| memory.0),
            gpu: gpu?,
            disk: disk?,
        })
    }
}

deserialize_by_decoding!(CpuSpec, GpuSpec, DiskSpec, ResourcesSpec);

fn vendor_schema() -> Schema {
    json_schema!({ "enum": GpuVendor::WORDS })
}

impl JsonSchema for CpuSpec {
    fn schema_name() -> Cow<'static, str> {
        "Cpu".into()
    }
    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let count = subschema::<Range<u32>>(generator);
        let mut object = json_schema!({
            "type": "object",
            "properties": { "arch": { "enum": ["x86", "arm", null] }, "count": count },
            "additionalProperties": false,
        });
        describe(&mut object, "Architecture and number of cores.");
        let short = json_schema!({ "type": "string", "pattern": r"^[0-9a-zA-Z.:\s]+$" });
        any_of(vec![subschema::<Range<u32>>(generator), short, object])
    }
}

impl JsonSchema for GpuSpec {
    fn schema_name() -> Cow<'static, str> {
        "Gpu".into()
    }
    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let mut count = subschema::<Range<u32>>(generator);
        default(&mut count, &Range::at_least(1u32));
        let memory = subschema::<Range<Gb>>(generator);
        let object = json_schema!({
            "type": "object",
            "properties": {
                "vendor": { "anyOf": [vendor_schema(), { "type": "null" }] },
                "name": { "anyOf": [{ "type": ["string", "null"] }, { "type": "array", "items": { "type": "string" } }] },
                "count": count,
                "memory": { "anyOf": [memory, { "type": "null" }] },
                "total_memory": { "anyOf": [memory, { "type": "null" }] },
                "compute_capability": { "anyOf": [
                    { "type": ["number", "string", "null"] },
                    { "type": "array", "items": { "type": "integer" }, "minItems": 2, "maxItems": 2 },
                ] },
            },
            "additionalProperties": false,
        });
        let short = json_schema!({ "type": ["string", "integer"] });
        any_of(vec![short, object])
    }
}

impl JsonSchema for DiskSpec {
    fn schema_name() -> Cow<'static, str> {
        "Disk".into()
    }
    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let size = subschema::<Range<Gb>>(generator);
        let object = json_schema!({
            "type": "object", "properties": { "size": size }, "required": ["size"], "additionalProperties": false,
        });
        any_of(vec![size, object])
    }
}

impl JsonSchema for ResourcesSpec {
    fn schema_name() -> Cow<'static, str> {
        "Resources".into()
    }
    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let usual = Self::default();
        let mut cpu = subschema::<CpuSpec>(generator);
        describe(&mut cpu, "Cores: `8`, `4..8`, `arm:4..`.");
        default(&mut cpu, &usual.cpu);
        let mut memory = subschema::<Range<Gb>>(generator);
        describe(&mut memory, "Memory: `16GB..`.");
        default(&mut memory, &usual.memory);
        let mut shm_size = subschema::<Option<MemorySize>>(generator);
        describe(&mut shm_size, "Size of shared memory (/dev/shm).");
        let mut gpu = subschema::<Option<GpuSpec>>(generator);
        describe(&mut gpu, "GPUs: `24GB`, `H100:80GB:8`, `nvidia:80GB..:2..8`.");
        default(&mut gpu, &usual.gpu);
        let mut disk = subschema::<Option<DiskSpec>>(generator);
        describe(&mut disk, "Disk: `100GB..`; null means any size.");
        default(&mut disk, &usual.disk);
        json_schema!({
            "type": "object",
            "description": "Resources that a job requires.",
            "properties": { "cpu": cpu, "memory": memory, "shm_size": shm_size, "gpu": gpu, "disk": disk },
            "additionalProperties": false,
        })
    }
}
