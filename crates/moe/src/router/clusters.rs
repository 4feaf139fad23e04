//! Clustered hashes (Roller et al., "Hash layers", 2106.04426, section 3.1): token ids with similar embeddings go to
//! the same expert. The clusters are those of k-means over the embeddings of a trained model: Lloyd's iteration
//! started by k-means++ (Arthur and Vassilvitskii, 2007).

use moeworks_ops::Context;
use moeworks_tensor::{Purpose, Random};

use super::{blocks, choice};

/// The maximum of rounds. The iteration ends earlier if no id changes its cluster.
const MAX_ROUNDS: usize = 100;

/// The random stream of the initial centres.
const STREAM: u64 = 0x636c_7573;

/// Returns `[ids, K]`: for each id the `top_k` of `num_experts` clusters whose centres are nearest to its embedding,
/// nearest first, the lower index at a tie.
///
/// Panics if `top_k` exceeds `num_experts`.
#[must_use]
pub fn clustered_hash(
    ctx: &Context,
    embedding: &[f32],
    width: usize,
    num_experts: usize,
    top_k: usize,
    seed: u64,
) -> Vec<u32> {
    assert!(top_k <= num_experts, "{top_k} of {num_experts} experts");
    let mut clusters = Clusters { points: embedding, width, centres: Vec::new() };
    clusters.begin(num_experts, &Random::new(seed, Purpose::Router, STREAM));
    let mut nearest = clusters.nearest(ctx, 1);
    for _ in 0..MAX_ROUNDS {
        clusters.move_centres(num_experts, &nearest);
        let next = clusters.nearest(ctx, 1);
        if next == nearest {
            break;
        }
        nearest = next;
    }
    clusters.nearest(ctx, top_k)
}

/// Points and the centres of their clusters.
struct Clusters<'a> {
    /// `[points, width]`
    points: &'a [f32],
    width: usize,
    /// `[clusters, width]`
    centres: Vec<f64>,
}

impl Clusters<'_> {
    /// Draws the initial centres from the points, each with a probability proportional to its squared distance to the
    /// nearest centre so far (k-means++).
    fn begin(&mut self, count: usize, random: &Random) {
        let mut squares = vec![1.0; self.points.len() / self.width.max(1)];
        for i in 0..count as u64 {
            let drawn = f64::from(random.uniform(i)) * squares.iter().sum::<f64>();
            let mut below = 0.0;
            let is_there = |square: &f64| {
                below += square;
                below > drawn
            };
            let at = squares.iter().position(is_there).unwrap_or(0);
            let centre: Vec<f64> =
                self.points.iter().skip(at * self.width).take(self.width).map(|&x| f64::from(x)).collect();
            for (square, point) in squares.iter_mut().zip(self.points.chunks(self.width)) {
                let new = distance(point, &centre);
                *square = if i == 0 { new } else { square.min(new) };
            }
            self.centres.extend(centre);
        }
    }

    /// Returns `[points, k]`: the nearest centres of each point.
    fn nearest(&self, ctx: &Context, k: usize) -> Vec<u32> {
        let mut nearest = vec![0; self.points.len() / self.width.max(1) * k];
        let inputs = blocks::split_mut(&mut nearest, k).zip(blocks::split(self.points, self.width));
        blocks::for_each(ctx, inputs, |_, (nearest, points)| {
            for (nearest, point) in nearest.chunks_mut(k).zip(points.chunks(self.width)) {
                let centres = self.centres.chunks(self.width);
                let closeness: Vec<f32> = centres.map(|centre| -distance(point, centre) as f32).collect();
                choice::top_k(&closeness, nearest);
            }
        });
        nearest
    }

    /// Moves each centre to the mean of its points. A centre without points moves to the point farthest from all
    /// centres.
    fn move_centres(&mut self, count: usize, nearest: &[u32]) {
        let (mut sums, mut sizes) = (vec![0.0; count * self.width], vec![0_u32; count]);
        for (&cluster, point) in nearest.iter().zip(self.points.chunks(self.width)) {
            let cluster = cluster as usize;
            sizes[cluster] += 1;
            sums[cluster * self.width..].iter_mut().zip(point).for_each(|(sum, &x)| *sum += f64::from(x));
        }
        for ((centre, sum), &size) in
            self.centres.chunks_mut(self.width).zip(sums.chunks(self.width)).zip(&sizes).filter(|(_, size)| **size > 0)
        {
            centre.iter_mut().zip(sum).for_each(|(centre, sum)| *centre = sum / f64::from(size));
        }
        for empty in (0..count).filter(|&cluster| sizes[cluster] == 0) {
            if let Some(point) = self.farthest().map(<[f32]>::to_vec) {
                self.centres[empty * self.width..].iter_mut().zip(&point).for_each(|(to, &x)| *to = f64::from(x));
            }
        }
    }

    /// Returns the point farthest from its nearest centre, the first at a tie; `None` if every point is a centre.
    fn farthest(&self) -> Option<&[f32]> {
        let least = |point: &[f32]| {
            self.centres.chunks(self.width).fold(f64::INFINITY, |least, centre| least.min(distance(point, centre)))
        };
        let points = self.points.chunks(self.width).map(|point| (least(point), point));
        let (far, point) = points.reduce(|best, next| if next.0 > best.0 { next } else { best })?;
        (far > 0.0).then_some(point)
    }
}

/// Returns the squared distance.
fn distance(point: &[f32], centre: &[f64]) -> f64 {
    point.iter().zip(centre).map(|(&x, centre)| (f64::from(x) - centre).powi(2)).sum()
}
