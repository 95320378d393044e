//! On-demand prices: from a catalogue that the settings name, or from a small table in this program.
//!
//! AWS publishes prices by a separate API, in documents of hundreds of megabytes. Catalogues in the format of gpuhunt,
//! which dstack publishes, are a few: a CSV file with the columns `instance_name`, `location`, `price` and `spot`.

use std::{collections::BTreeMap, path::Path, time::Duration};

use hyper::body::Bytes;
use windlass_model::money::Price;

use crate::http::{HttpClient, HttpRequest};

/// Day on which the table was written.
pub(crate) const TABLE_DATE: &str = "2025-10-01";
/// Regions for which the table holds. Others are dearer, each by its own factor.
const TABLE_REGIONS: [&str; 3] = ["us-east-1", "us-east-2", "us-west-2"];
const FETCH_TIMEOUT: Duration = Duration::from_secs(60);
const FILE_BYTES_MAX: u64 = 64 * 1024 * 1024;
const COLUMNS: [&str; 3] = ["instance_name", "location", "price"];

#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum PriceError {
    #[error("failed to read the prices in `{source_name}`: {message}")]
    Read { source_name: String, message: String },
    #[error(
        "`{source_name}` has no column `{column}`: expected a CSV file with `instance_name`, `location` and `price`"
    )]
    Column { source_name: String, column: &'static str },
}

/// Source of a price.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PriceSource {
    Catalogue,
    /// The table in this program, which is of [`TABLE_DATE`].
    Table,
}

/// On-demand prices by region and type.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Prices(BTreeMap<String, BTreeMap<String, Price>>);

impl Prices {
    /// Reads a catalogue from a file or a URL.
    pub(crate) async fn fetch(http: &HttpClient, place: &str) -> Result<Self, PriceError> {
        let failed = |message: String| PriceError::Read { source_name: place.to_owned(), message };
        let text = match place.split_once("://") {
            Some(("http" | "https", _)) => download(http, place).await.map_err(failed)?,
            Some(("file", path)) => {
                read_file(Path::new(path)).await.map_err(|error| failed(error.to_string()))?
            }
            Some(_) | None => read_file(Path::new(place)).await.map_err(|error| failed(error.to_string()))?,
        };
        Self::parse(&text, place)
    }

    fn parse(text: &str, place: &str) -> Result<Self, PriceError> {
        let mut lines = text.lines();
        let head = split_row(lines.next().unwrap_or_default().trim_start_matches('\u{feff}'));
        let column = |name: &str| head.iter().position(|title| title == name);
        let mut at = [0; COLUMNS.len()];
        for (index, name) in COLUMNS.into_iter().enumerate() {
            let missing = || PriceError::Column { source_name: place.to_owned(), column: name };
            at[index] = column(name).ok_or_else(missing)?;
        }
        let [name, location, price] = at;
        let spot = column("spot");
        let mut prices = Self::default();
        for row in lines.map(split_row) {
            let cell = |index: usize| row.get(index).map(String::as_str).unwrap_or_default();
            let is_spot = spot.is_some_and(|index| cell(index).eq_ignore_ascii_case("true"));
            let dollars = cell(price).parse::<f64>().ok().filter(|dollars| *dollars > 0.0);
            if let (false, Some(dollars)) = (is_spot, dollars) {
                let region = prices.0.entry(cell(location).to_owned()).or_default();
                region.entry(cell(name).to_owned()).or_insert_with(|| Price::from_dollars(dollars));
            }
        }
        Ok(prices)
    }

    /// Returns the on-demand price of a type, and its source.
    pub(crate) fn find(&self, region: &str, instance_type: &str) -> Option<(Price, PriceSource)> {
        let known = self.0.get(region).and_then(|region| region.get(instance_type));
        match known {
            Some(price) => Some((*price, PriceSource::Catalogue)),
            None => table_price(region, instance_type).map(|price| (price, PriceSource::Table)),
        }
    }

    /// Number of regions and of prices, for people.
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.0.len(), self.0.values().map(BTreeMap::len).sum())
    }
}

async fn download(http: &HttpClient, url: &str) -> Result<String, String> {
    let path_at = url.match_indices('/').nth(2).map_or(url.len(), |(at, _)| at);
    let (origin, path) = url.split_at(path_at);
    let path = if path.is_empty() { "/" } else { path };
    let request =
        HttpRequest { origin, method: "GET", path, headers: &[], body: Bytes::new(), limit: FETCH_TIMEOUT };
    let answer = http.send(&request).await.map_err(|error| error.to_string())?;
    match answer.is_success() {
        true => Ok(answer.text().into_owned()),
        false => Err(format!("the server answered {}", answer.status)),
    }
}

async fn read_file(path: &Path) -> std::io::Result<String> {
    use tokio::io::AsyncReadExt as _;
    let mut text = String::new();
    tokio::fs::File::open(path).await?.take(FILE_BYTES_MAX).read_to_string(&mut text).await?;
    Ok(text)
}

/// Splits a row of a CSV file. Cells in quotes may contain commas, and quotes that are doubled.
fn split_row(line: &str) -> Vec<String> {
    let mut cells = vec![String::new()];
    let mut is_quoted = false;
    let mut letters = line.trim_end_matches('\r').chars().peekable();
    while let Some(letter) = letters.next() {
        let Some(cell) = cells.last_mut() else { break };
        match letter {
            '"' if is_quoted && letters.peek() == Some(&'"') => {
                letters.next();
                cell.push('"');
            }
            '"' => is_quoted = !is_quoted,
            ',' if !is_quoted => cells.push(String::new()),
            other => cell.push(other),
        }
    }
    cells
}

fn table_price(region: &str, instance_type: &str) -> Option<Price> {
    if !TABLE_REGIONS.contains(&region) {
        return None;
    }
    let (family, size) = instance_type.split_once('.')?;
    if let Some((_, dollars)) = FIXED.iter().find(|(name, _)| *name == instance_type) {
        return Some(Price::from_dollars(*dollars));
    }
    let (_, xlarge) = FAMILIES.iter().find(|(name, _)| *name == family)?;
    Some(Price::from_dollars(xlarge * size_factor(size)?))
}

/// Returns how many `xlarge` a size is.
fn size_factor(size: &str) -> Option<f64> {
    match size {
        "nano" => Some(1.0 / 32.0),
        "micro" => Some(1.0 / 16.0),
        "small" => Some(1.0 / 8.0),
        "medium" => Some(1.0 / 4.0),
        "large" => Some(1.0 / 2.0),
        "xlarge" => Some(1.0),
        _ => size.strip_suffix("xlarge")?.parse().ok(),
    }
}

/// Families whose price is proportional to the size, with the price of an `xlarge`.
const FAMILIES: [(&str, f64); 4] = [("t3", 0.1664), ("m7i", 0.2016), ("c7i", 0.1785), ("r7i", 0.2646)];

/// Types with GPUs.
const FIXED: [(&str, f64); 35] = [
    ("g4dn.xlarge", 0.526),
    ("g4dn.2xlarge", 0.752),
    ("g4dn.4xlarge", 1.204),
    ("g4dn.8xlarge", 2.176),
    ("g4dn.12xlarge", 3.912),
    ("g4dn.16xlarge", 4.352),
    ("g5.xlarge", 1.006),
    ("g5.2xlarge", 1.212),
    ("g5.4xlarge", 1.624),
    ("g5.8xlarge", 2.448),
    ("g5.12xlarge", 5.672),
    ("g5.16xlarge", 4.096),
    ("g5.24xlarge", 8.144),
    ("g5.48xlarge", 16.288),
    ("g6.xlarge", 0.8048),
    ("g6.2xlarge", 0.9776),
    ("g6.4xlarge", 1.3232),
    ("g6.8xlarge", 2.0144),
    ("g6.12xlarge", 4.6016),
    ("g6.16xlarge", 3.3968),
    ("g6.24xlarge", 6.6752),
    ("g6.48xlarge", 13.3504),
    ("g6e.xlarge", 1.861),
    ("g6e.2xlarge", 2.24208),
    ("g6e.4xlarge", 3.00424),
    ("g6e.8xlarge", 4.52856),
    ("g6e.12xlarge", 10.49264),
    ("g6e.16xlarge", 7.57719),
    ("g6e.24xlarge", 15.06559),
    ("g6e.48xlarge", 30.13118),
    ("p3.2xlarge", 3.06),
    ("p3.8xlarge", 12.24),
    ("p3.16xlarge", 24.48),
    ("p4d.24xlarge", 21.957642),
    ("p5.48xlarge", 55.04),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_catalogue_has_precedence_over_the_table_and_its_spot_prices_are_not_used() {
        let text = "instance_name,location,price,cpu,memory,gpu_count,gpu_name,gpu_memory,spot,disk_size\r\n\
                    g5.xlarge,us-east-1,1.5,4,16.0,1,A10G,24.0,False,\r\n\
                    g5.xlarge,us-east-1,0.4,4,16.0,1,A10G,24.0,True,\r\n\
                    \"odd, name\",eu-west-1,2,4,16.0,0,,,False,\r\n\
                    free,eu-west-1,0,4,16.0,0,,,False,\r\n";
        let prices = Prices::parse(text, "here").unwrap();
        let dollars =
            |region, name| prices.find(region, name).map(|(price, from)| (price.as_dollars(), from));
        assert_eq!(dollars("us-east-1", "g5.xlarge"), Some((1.5, PriceSource::Catalogue)));
        assert_eq!(dollars("us-east-1", "g5.2xlarge"), Some((1.212, PriceSource::Table)));
        assert_eq!(dollars("eu-west-1", "odd, name"), Some((2.0, PriceSource::Catalogue)));
        assert_eq!(dollars("eu-west-1", "free"), None, "nothing is free");
        assert_eq!(prices.counts(), (2, 2));
    }

    #[test]
    fn the_table_holds_for_some_regions_only() {
        let prices = Prices::default();
        let dollars = |region, name| Some(prices.find(region, name)?.0.as_dollars());
        assert_eq!(dollars("us-east-1", "m7i.large"), Some(0.1008));
        assert_eq!(dollars("us-west-2", "c7i.48xlarge"), Some(8.568));
        assert_eq!(dollars("us-east-1", "t3.medium"), Some(0.0416));
        assert_eq!(dollars("eu-west-1", "m7i.large"), None);
        assert_eq!(dollars("us-east-1", "x9.large"), None);
        assert_eq!(dollars("us-east-1", "m7i.metal-24xl"), None);
    }

    #[tokio::test]
    async fn a_catalogue_that_cannot_be_used_is_an_error_with_its_name() {
        let missing =
            Prices::fetch(&HttpClient::default(), "/nonexistent.csv").await.unwrap_err().to_string();
        assert!(missing.contains("`/nonexistent.csv`"), "{missing}");
        let wrong = Prices::parse("a,b\n1,2\n", "x.csv").unwrap_err().to_string();
        assert!(wrong.contains("no column `instance_name`"), "{wrong}");
    }
}
