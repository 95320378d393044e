//! A small seeded random generator, so that one number reproduces a whole run.

use std::time::Duration;

/// SplitMix64: tiny, good enough for faults and jitter, and identical on all platforms.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns an independent stream, so that the draws of one consumer do not affect another.
    pub fn fork(&mut self) -> Self {
        Self(self.draw())
    }

    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Returns a number in `lo..=hi`.
    pub fn between(&mut self, lo: u64, hi: u64) -> u64 {
        lo + self.draw() % (hi - lo + 1)
    }

    /// Returns a number in `0..sides`.
    pub fn below(&mut self, sides: u64) -> u64 {
        self.draw() % sides
    }

    /// Returns bytes that do not repeat.
    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut bytes: Vec<u8> = (0..count.div_ceil(8)).flat_map(|_| self.draw().to_le_bytes()).collect();
        bytes.truncate(count);
        bytes
    }

    /// True in `percent` of a hundred cases.
    pub fn chance(&mut self, percent: u64) -> bool {
        self.between(1, 100) <= percent
    }

    pub fn millis(&mut self, lo: u64, hi: u64) -> Duration {
        Duration::from_millis(self.between(lo, hi))
    }

    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.between(0, from.len() as u64 - 1) as usize]
    }
}
