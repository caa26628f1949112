//! Which dataset of a blend gives sample n, at exact shares and without a table.

use crate::error::BuildError;

/// Where a sample of a blend comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Dataset of the blend.
    pub dataset: usize,
    /// Sample of that dataset.
    pub sample: u64,
}

/// Shares of the datasets of a blend that hold for every prefix of the samples.
///
/// The datasets are leaves of a binary tree, the lightest joined first (Huffman's tree). Each node hands the samples
/// that reach it to its two sides at their exact ratio, rounded to the nearest whole number, so its error is at most half
/// a sample. A leaf sums up the errors of the nodes above it, each lessened by the leaf's part in that node: with two
/// datasets a prefix is off by half a sample at most, with any number by less than two. Sample n is found in as many
/// steps as the leaf is deep.
#[derive(Debug, Clone, PartialEq)]
pub struct Shares {
    nodes: Vec<Node>,
    root: Child,
    num_datasets: usize,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Child {
    Leaf(usize),
    Node(usize),
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Node {
    heavy: Child,
    light: Child,
    /// Part of the light side, as a fraction of 2^64.
    light_part: u64,
}

impl Node {
    /// Of the first `count` samples that reach the node, those that the light side takes.
    #[inline]
    fn light_count(&self, count: u64) -> u64 {
        let exact = u128::from(count) * u128::from(self.light_part);
        ((exact + (1 << 63)) >> 64) as u64
    }
}

impl Shares {
    /// Shares in the ratio of `weights`. A weight of 0 is never drawn.
    ///
    /// # Errors
    /// [`BuildError::BadWeights`] if there is no weight, one is negative or no number, or none is above 0.
    pub fn new(weights: &[f64]) -> Result<Self, BuildError> {
        check_weights(weights)?;
        let drawn = weights.iter().enumerate().filter(|(_, weight)| **weight > 0.0);
        let mut open: Vec<(f64, Child)> = drawn.map(|(dataset, &weight)| (weight, Child::Leaf(dataset))).collect();
        // Heaviest first; equal weights keep their order, so the tree is a function of the weights alone.
        open.sort_by(|left, right| right.0.total_cmp(&left.0));
        let mut nodes = Vec::with_capacity(open.len().saturating_sub(1));
        while open.len() > 1 {
            let (Some(light), Some(heavy)) = (open.pop(), open.pop()) else { break };
            let weight = light.0 + heavy.0;
            // Below one half of the node, so it fits.
            let light_part = (light.0 / weight * 2f64.powi(64)) as u64;
            nodes.push(Node { heavy: heavy.1, light: light.1, light_part });
            let place = open.partition_point(|entry| entry.0 > weight);
            open.insert(place, (weight, Child::Node(nodes.len() - 1)));
        }
        let root = open.first().map_or(Child::Leaf(0), |entry| entry.1);
        Ok(Self { nodes, root, num_datasets: weights.len() })
    }

    /// Number of datasets, those with weight 0 included.
    pub fn num_datasets(&self) -> usize {
        self.num_datasets
    }

    /// Where sample `index` comes from.
    #[inline]
    pub fn locate(&self, index: u64) -> Place {
        let (mut child, mut sample) = (self.root, index);
        loop {
            match child {
                Child::Leaf(dataset) => return Place { dataset, sample },
                Child::Node(node) => {
                    let node = &self.nodes[node];
                    let light = node.light_count(sample);
                    if node.light_count(sample + 1) > light {
                        (child, sample) = (node.light, light);
                    } else {
                        (child, sample) = (node.heavy, sample - light);
                    }
                }
            }
        }
    }

    /// Samples that each dataset gives to the first `count`.
    pub fn counts(&self, count: u64) -> Vec<u64> {
        let mut counts = vec![0; self.num_datasets];
        let mut open = vec![(self.root, count)];
        while let Some((child, count)) = open.pop() {
            match child {
                Child::Leaf(dataset) => counts[dataset] = count,
                Child::Node(node) => {
                    let node = &self.nodes[node];
                    let light = node.light_count(count);
                    open.extend([(node.light, light), (node.heavy, count - light)]);
                }
            }
        }
        counts
    }
}

/// Whether weights mean something.
pub(crate) fn check_weights(weights: &[f64]) -> Result<(), BuildError> {
    let bad = |reason: String| Err(BuildError::BadWeights { reason });
    if weights.is_empty() {
        return bad("there is none".to_owned());
    }
    if let Some(place) = weights.iter().position(|weight| !weight.is_finite() || *weight < 0.0) {
        return bad(format!("weight {} is {}", place + 1, weights[place]));
    }
    let total: f64 = weights.iter().sum();
    if total <= 0.0 {
        return bad("all are 0".to_owned());
    }
    if !total.is_finite() {
        return bad(format!("they add up to {total}"));
    }
    Ok(())
}

/// Weights that change at stated samples, without touching what came before.
#[derive(Debug, Clone, PartialEq)]
pub struct Phases {
    phases: Vec<Phase>,
}

#[derive(Debug, Clone, PartialEq)]
struct Phase {
    first: u64,
    shares: Shares,
    /// Samples that each dataset gave before this phase.
    before: Vec<u64>,
}

impl Phases {
    /// Phases by their first sample and their weights. The first begins at sample 0, and they ascend.
    ///
    /// # Errors
    /// [`BuildError::BadWeights`] as [`Shares::new`], or if the phases do not fit together.
    pub fn new(phases: &[(u64, Vec<f64>)]) -> Result<Self, BuildError> {
        let bad = |reason: String| Err(BuildError::BadWeights { reason });
        let mut built: Vec<Phase> = Vec::with_capacity(phases.len());
        for (number, (first, weights)) in phases.iter().enumerate() {
            let shares = Shares::new(weights)?;
            let before = match built.last() {
                None if *first != 0 => return bad(format!("the first phase begins at sample {first}, not at 0")),
                None => vec![0; weights.len()],
                Some(last) if *first <= last.first => {
                    return bad(format!(
                        "phase {} begins at sample {first}, not behind sample {}",
                        number + 1,
                        last.first
                    ));
                }
                Some(last) if weights.len() != last.before.len() => {
                    return bad(format!(
                        "phase {} has {} weights, the one before {}; give 0 to a dataset that is not drawn",
                        number + 1,
                        weights.len(),
                        last.before.len()
                    ));
                }
                Some(last) => last.counts(*first),
            };
            built.push(Phase { first: *first, shares, before });
        }
        if built.is_empty() {
            return bad("there is none".to_owned());
        }
        Ok(Self { phases: built })
    }

    /// Number of datasets.
    pub fn num_datasets(&self) -> usize {
        self.phases[0].before.len()
    }

    /// Where sample `index` comes from.
    #[inline]
    pub fn locate(&self, index: u64) -> Place {
        let phase = self.phase_of(index);
        let place = phase.shares.locate(index - phase.first);
        Place { sample: phase.before[place.dataset] + place.sample, ..place }
    }

    /// Samples that each dataset gives to the first `count`.
    pub fn counts(&self, count: u64) -> Vec<u64> {
        self.phase_of(count).counts(count)
    }

    fn phase_of(&self, index: u64) -> &Phase {
        // The first phase begins at 0.
        &self.phases[self.phases.partition_point(|phase| phase.first <= index) - 1]
    }
}

impl Phase {
    fn counts(&self, count: u64) -> Vec<u64> {
        let own = self.shares.counts(count - self.first);
        self.before.iter().zip(own).map(|(before, own)| before + own).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_datasets_alternate_within_half_a_sample() {
        let shares = Shares::new(&[0.25, 0.75]).unwrap();
        let order: Vec<usize> = (0..8).map(|index| shares.locate(index).dataset).collect();
        assert_eq!(order, [1, 0, 1, 1, 1, 0, 1, 1]);
        for count in 0..1000 {
            assert!((shares.counts(count)[0] as f64 - 0.25 * count as f64).abs() <= 0.5);
        }
    }

    #[test]
    fn weight_zero_is_never_drawn() {
        let shares = Shares::new(&[0.0, 1.0, 0.0, 2.0]).unwrap();
        assert!((0..1000).all(|index| matches!(shares.locate(index).dataset, 1 | 3)));
        assert_eq!(shares.counts(999), [0, 333, 0, 666]);
        assert_eq!(Shares::new(&[0.0, 5.0]).unwrap().counts(7), [0, 7]);
    }

    #[test]
    fn weights_without_meaning_are_refused() {
        for (weights, word) in [
            (&[][..], "there is none"),
            (&[0.0, 0.0], "all are 0"),
            (&[1.0, -0.5], "weight 2 is -0.5"),
            (&[f64::NAN], "weight 1 is NaN"),
            (&[f64::INFINITY], "weight 1 is inf"),
            (&[f64::MAX, f64::MAX], "add up to inf"),
        ] {
            let message = Shares::new(weights).unwrap_err().to_string();
            assert!(message.contains(word), "{message}");
        }
    }

    #[test]
    fn later_phase_leaves_the_past_as_it_was() {
        let one = Phases::new(&[(0, vec![0.7, 0.3, 0.0])]).unwrap();
        let two = Phases::new(&[(0, vec![0.7, 0.3, 0.0]), (1000, vec![0.1, 0.3, 0.6])]).unwrap();
        assert!((0..1000).all(|index| one.locate(index) == two.locate(index)));
        assert_eq!(two.counts(1000), [700, 300, 0]);
        assert_eq!(two.counts(2000), [800, 600, 600]);
        // Every dataset goes on where it stood.
        let mut next = [0u64; 3];
        for index in 0..3000 {
            let place = two.locate(index);
            assert_eq!(place.sample, next[place.dataset]);
            next[place.dataset] += 1;
        }
    }

    #[test]
    fn phases_that_do_not_fit_together_are_refused() {
        let weights = || vec![1.0, 1.0];
        for (phases, word) in [
            (vec![], "there is none"),
            (vec![(5, weights())], "begins at sample 5"),
            (vec![(0, weights()), (0, weights())], "phase 2 begins at sample 0"),
            (vec![(0, weights()), (9, vec![1.0])], "phase 2 has 1 weights"),
        ] {
            let message = Phases::new(&phases).unwrap_err().to_string();
            assert!(message.contains(word), "{message}");
        }
    }
}
