//! Fill in the middle: documents cut in three and reordered, so that a model learns to write what lies between.

use std::sync::Arc;

use megaflow_core::{SampleError, SampleLayout, SampleSource, TokensMut, mix};

use crate::error::BuildError;

/// Text behind token ids, for cuts that fall inside a token.
pub trait TextCodec: Send + Sync {
    /// The text of `ids`, or `None` if it is not whole (the ids begin or end inside a letter).
    fn decode(&self, ids: &[i64]) -> Option<String>;
    /// Appends the ids of `text`, without special tokens.
    fn encode(&self, text: &str, out: &mut Vec<i64>);
}

/// How documents are reordered.
#[derive(Debug, Clone, PartialEq)]
pub struct FimConfig {
    /// Part of the documents that is reordered, 0 to 1.
    pub rate: f64,
    /// Part of those that is written suffix first, 0 to 1.
    pub spm_rate: f64,
    /// Seed. The same seed and sample give the same tokens, whatever was read before.
    pub seed: u64,
    /// Ids of the tokens that mark prefix, middle and suffix.
    pub prefix_id: i64,
    /// As above.
    pub middle_id: i64,
    /// As above.
    pub suffix_id: i64,
    /// Id that ends a document and stays at its end.
    pub eod_id: Option<i64>,
    /// Id that fills up samples.
    pub pad_id: i64,
}

/// Samples of another set with documents reordered (Bavarian et al., "Efficient Training of Language Models to Fill in
/// the Middle", 2022).
///
/// Each document in a sample is reordered with probability `rate`, on its own: it is cut at two places drawn evenly over its
/// text (over its tokens without a codec, or where they are no whole text), and becomes `prefix-mark prefix suffix-mark
/// suffix middle-mark middle`, or, suffix first, `prefix-mark suffix-mark suffix middle-mark prefix middle`. A sample
/// grows by the marks; what no longer fits is cut off at its end.
pub struct FimSource {
    inner: Arc<dyn SampleSource>,
    config: FimConfig,
    codec: Option<Arc<dyn TextCodec>>,
}

impl FimSource {
    /// Reorders the samples of `inner`, cutting text by `codec`.
    ///
    /// # Errors
    /// [`BuildError::BadSetting`] if a rate is not in 0 to 1.
    pub fn new(
        inner: Arc<dyn SampleSource>,
        config: FimConfig,
        codec: Option<Arc<dyn TextCodec>>,
    ) -> Result<Self, BuildError> {
        for (setting, rate) in [("fim_rate", config.rate), ("fim_spm_rate", config.spm_rate)] {
            if !(0.0..=1.0).contains(&rate) {
                return Err(BuildError::BadSetting { setting, expected: "0 to 1", found: rate as i128 });
            }
        }
        Ok(Self { inner, config, codec })
    }

    /// The reordered sample, as long as it comes out, and where its documents begin.
    fn reorder(&self, index: u64) -> Result<(Vec<i64>, SampleLayout), SampleError> {
        let mut tokens = vec![0; self.inner.sample_len()];
        self.inner.read_sample(index, &mut tokens)?;
        tokens.truncate(self.inner.sample_tokens(index)?);
        let mut layout = SampleLayout::default();
        self.inner.layout(index, &mut layout)?;
        let mut bounds: Vec<usize> = layout.starts.iter().map(|&start| start as usize).collect();
        if bounds.first() != Some(&0) {
            bounds.insert(0, 0);
        }
        bounds.retain(|&start| start < tokens.len());
        bounds.push(tokens.len());
        let mut random = Draws { state: mix(self.config.seed ^ mix(index.wrapping_add(1))) };
        let mut out = Vec::with_capacity(tokens.len() + 3 * bounds.len());
        layout.starts.clear();
        for bound in bounds.windows(2) {
            layout.starts.push(out.len() as u32);
            self.reorder_document(&tokens[bound[0]..bound[1]], &mut random, &mut out);
        }
        out.truncate(self.inner.sample_len());
        layout.starts.retain(|&start| (start as usize) < out.len());
        if out.len() < self.inner.sample_len() {
            layout.starts.push(out.len() as u32);
        }
        Ok((out, layout))
    }

    fn reorder_document(&self, document: &[i64], random: &mut Draws, out: &mut Vec<i64>) {
        // All draws are made for every document, so that one document's fate does not hang on another's.
        let (chosen, suffix_first) = (random.unit() < self.config.rate, random.unit() < self.config.spm_rate);
        let cuts = [random.unit(), random.unit()];
        let ends = self.config.eod_id.is_some_and(|eod| document.last() == Some(&eod));
        let (body, end) = document.split_at(document.len() - usize::from(ends));
        if !chosen || body.is_empty() {
            out.extend(document);
            return;
        }
        let [prefix, middle, suffix] = self.cut(body, cuts);
        let FimConfig { prefix_id, middle_id, suffix_id, .. } = self.config;
        if suffix_first {
            out.extend([prefix_id, suffix_id]);
            out.extend(suffix);
            out.push(middle_id);
            out.extend(prefix);
        } else {
            out.push(prefix_id);
            out.extend(prefix);
            out.push(suffix_id);
            out.extend(suffix);
            out.push(middle_id);
        }
        out.extend(middle);
        out.extend(end);
    }

    fn cut(&self, body: &[i64], cuts: [f64; 2]) -> [Vec<i64>; 3] {
        let (low, high) = (cuts[0].min(cuts[1]), cuts[0].max(cuts[1]));
        let place = |part: f64, len: usize| ((part * (len as f64 + 1.0)) as usize).min(len);
        if let Some((codec, text)) = self.codec.as_ref().and_then(|codec| Some((codec, codec.decode(body)?))) {
            let letters = text.chars().count();
            let byte = |letter: usize| text.char_indices().nth(letter).map_or(text.len(), |(at, _)| at);
            let (first, second) = (byte(place(low, letters)), byte(place(high, letters)));
            return [&text[..first], &text[first..second], &text[second..]].map(|part| {
                let mut ids = Vec::new();
                codec.encode(part, &mut ids);
                ids
            });
        }
        let (first, second) = (place(low, body.len()), place(high, body.len()));
        [body[..first].to_vec(), body[first..second].to_vec(), body[second..].to_vec()]
    }
}

impl SampleSource for FimSource {
    fn num_samples(&self) -> u64 {
        self.inner.num_samples()
    }

    fn sample_len(&self) -> usize {
        self.inner.sample_len()
    }

    fn read_sample(&self, index: u64, out: &mut [i64]) -> Result<(), SampleError> {
        self.read_into(index, TokensMut::I64(out))
    }

    fn read_into(&self, index: u64, out: TokensMut<'_>) -> Result<(), SampleError> {
        self.read_counted(index, out).map(|_| ())
    }

    fn read_counted(&self, index: u64, mut out: TokensMut<'_>) -> Result<usize, SampleError> {
        let (tokens, _) = self.reorder(index)?;
        out.pad(self.config.pad_id);
        out.write_i64(index, &tokens)?;
        Ok(tokens.len())
    }

    fn read_ahead(&self, index: u64) {
        self.inner.read_ahead(index);
    }

    fn sample_tokens(&self, index: u64) -> Result<usize, SampleError> {
        Ok(self.reorder(index)?.0.len())
    }

    fn layout(&self, index: u64, layout: &mut SampleLayout) -> Result<(), SampleError> {
        *layout = self.reorder(index)?.1;
        Ok(())
    }

    fn has_sample(&self, index: u64) -> Result<bool, SampleError> {
        self.inner.has_sample(index)
    }

    fn announce(&self, index: u64) {
        self.inner.announce(index);
    }

    fn received(&self, count: u64) {
        self.inner.received(count);
    }
}

/// A stream of numbers in 0 to 1.
struct Draws {
    state: u64,
}

impl Draws {
    fn unit(&mut self) -> f64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        (mix(self.state) >> 11) as f64 / (1u64 << 53) as f64
    }
}
