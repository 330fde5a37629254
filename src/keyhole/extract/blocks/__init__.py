"""Parts of the extraction of a whole Transformer block (extract/block.py), in the order they run.

A block is attention, whose output joins the token, and a feed-forward layer of *units*
`c_k·φ(a_k·u + α_k)`. It is read from the back: single tokens show everything behind
attention.

    view               norms in front of the parts or behind the sums, vectors or scores
    units              what a unit computes; which of φ(z) and φ(−z) it is
    curvature, kinks   a start for the units, from second derivatives or, for ReLU, from kinks;
                       wide_curvature for many units, and behind a norm of their sum
    rank_ones, shapes  steps of curvature: the rows a_k; the activation, lengths and offsets α_k
    fit, descent       all numbers of the layer at once; descent is for wide ones
    pre_norm           everything behind attention, if norms are in front of the parts (Llama);
    post_norm          and if they are behind the sums (BERT), where between_norms fits the layer
    peeled             what attention adds to a token, with everything behind it undone
    heads              the heads, from scores; position_bias: heads with a bias of positions;
    all_heads          all numbers of attention at once (else extract/sub_layer.py reads the heads)
"""
