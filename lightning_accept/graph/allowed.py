"""The allow-list: every operation that a stage program may name, and no other."""

from __future__ import annotations

# One packet per line: the op's name, then its overloads. Nothing here touches files, devices, storages or processes.
_TABLE = """
abs default
abs_ default
acos default
acosh default
adaptive_avg_pool1d default
adaptive_avg_pool2d default
adaptive_avg_pool3d default
adaptive_max_pool1d default
adaptive_max_pool2d default
adaptive_max_pool3d default
add Scalar Tensor
add_ Scalar Tensor
addbmm default
addcdiv default
addcdiv_ default
addcmul default
addcmul_ default
addmm default
addmv default
affine_grid_generator default
alias default
all default dim dims
alpha_dropout default
alpha_dropout_ default
amax default
amin default
aminmax default
any default dim dims
arange default start start_step
argmax default
argmin default
argsort default stable
as_strided default
asin default
asinh default
atan default
atan2 default
atanh default
atleast_1d default
atleast_2d default
atleast_3d default
avg_pool1d default
avg_pool2d default
avg_pool3d default
baddbmm default
batch_norm default
bernoulli default p
bernoulli_ Tensor float
bilinear default
bitwise_and Scalar Tensor
bitwise_not default
bitwise_or Scalar Tensor
bitwise_xor Scalar Tensor
bmm default
broadcast_tensors default
broadcast_to default
bucketize Scalar Tensor
cat default
cdist default
ceil default
celu default
celu_ default
channel_shuffle default
chunk default
clamp Tensor default
clamp_ Tensor default
clamp_max Tensor default
clamp_max_ Tensor default
clamp_min Tensor default
clamp_min_ Tensor default
clone default
col2im default
complex default
concat default
concatenate default
conj default
constant_pad_nd default
contiguous default
conv1d default padding
conv2d default padding
conv3d default padding
conv_transpose1d default
conv_transpose2d input
conv_transpose3d input
convolution default
copy_ default
cos default
cosh default
cosine_similarity default
count_nonzero default dim_IntList
cross default
cummax default
cummin default
cumprod default
cumsum default
detach default
detach_ default
diag default
diag_embed default
diagonal default
diff default
div Scalar Scalar_mode Tensor Tensor_mode
div_ Scalar Scalar_mode Tensor Tensor_mode
dot default
dropout default
dropout_ default
dstack default
einsum default
elu default
elu_ default
embedding default
embedding_bag default padding_idx
empty memory_format
empty_like default
eq Scalar Tensor
erf default
erfc default
erfinv default
exp default
exp2 default
exp_ default
expand default
expand_as default
expm1 default
exponential_ default
eye default m
feature_alpha_dropout default
feature_alpha_dropout_ default
feature_dropout default
feature_dropout_ default
fft_fft default
fft_fft2 default
fft_fftn default
fft_ifft default
fft_ifft2 default
fft_ifftn default
fft_irfft default
fft_irfft2 default
fft_irfftn default
fft_rfft default
fft_rfft2 default
fft_rfftn default
fill Scalar Tensor
fill_ Scalar Tensor
flatten using_ints
flip default
fliplr default
flipud default
floor default
floor_divide Scalar default
fmod Scalar Tensor
frac default
full default
full_like default
gather default
ge Scalar Tensor
gelu default
gelu_ default
ger default
glu default
grid_sampler default
group_norm default
gru input
gru_cell default
gt Scalar Tensor
hardshrink default
hardsigmoid default
hardsigmoid_ default
hardswish default
hardswish_ default
hardtanh default
hardtanh_ default
heaviside default
hstack default
hypot default
im2col default
imag default
index Tensor
index_add default
index_add_ default
index_copy default
index_copy_ default
index_fill int_Scalar int_Tensor
index_put default
index_put_ default
index_reduce default
index_select default
instance_norm default
isfinite default
isin Scalar_Tensor Tensor_Scalar Tensor_Tensor
isinf default
isnan default
kron default
kthvalue default
layer_norm default
le Scalar Tensor
leaky_relu default
leaky_relu_ default
lerp Scalar Tensor
lerp_ Scalar Tensor
lift_fresh default
lift_fresh_copy default
linalg_cross default
linalg_matrix_norm default str_ord
linalg_norm default ord_str
linalg_vector_norm default
linear default
linspace default
log default
log10 default
log1p default
log2 default
log_sigmoid default
log_softmax int
logaddexp default
logaddexp2 default
logical_and default
logical_not default
logical_or default
logical_xor default
logit default
logsumexp default
lstm input
lstm_cell default
lt Scalar Tensor
mT default
masked_fill Scalar Tensor
masked_fill_ Scalar Tensor
masked_scatter default
matmul default
max default dim other
max_pool1d default
max_pool1d_with_indices default
max_pool2d default
max_pool2d_with_indices default
max_pool3d default
max_pool3d_with_indices default
max_unpool2d default
maximum default
mean default dim
median default dim
meshgrid default indexing
min default dim other
minimum default
mish default
mish_ default
mm default
moveaxis int intlist
movedim int intlist
mul Scalar Tensor
mul_ Scalar Tensor
mv default
nan_to_num default
nan_to_num_ default
nanmean default
nansum default
narrow default
ne Scalar Tensor
neg default
neg_ default
new_empty default
new_full default
new_ones default
new_zeros default
norm Scalar ScalarOpt_dim ScalarOpt_dim_dtype ScalarOpt_dtype
normal_ default
numpy_T default
one_hot default
ones default
ones_like default
outer default
pad default
pairwise_distance default
permute default
pixel_shuffle default
pixel_unshuffle default
polar default
positive default
pow Scalar Tensor_Scalar Tensor_Tensor
pow_ Scalar Tensor
prelu default
prod default dim_int
quantile default scalar
rand default
rand_like default
randint default low
randint_like default low_dtype
randn default
randn_like default
randperm default
ravel default
real default
reciprocal default
reflection_pad1d default
reflection_pad2d default
reflection_pad3d default
relu default
relu6 default
relu6_ default
relu_ default
remainder Scalar Tensor
renorm default
repeat default
repeat_interleave Tensor self_Tensor self_int
replication_pad1d default
replication_pad2d default
replication_pad3d default
reshape default
reshape_as default
resolve_conj default
resolve_neg default
rms_norm default
rnn_relu input
rnn_tanh input
roll default
rot90 default
round decimals default
rrelu default
rrelu_ default
rsqrt default
rsub Scalar Tensor
scalar_tensor default
scaled_dot_product_attention default
scatter reduce src value value_reduce
scatter_ src value
scatter_add default
scatter_add_ default
scatter_reduce two
searchsorted Scalar Tensor
select int
select_scatter default
selu default
selu_ default
sgn default
sigmoid default
sigmoid_ default
sign default
silu default
silu_ default
sin default
sinc default
sinh default
slice Tensor
slice_scatter default
softmax int
softplus default
softshrink default
sort default stable
split Tensor sizes
split_with_sizes default
sqrt default
sqrt_ default
square default
square_ default
squeeze default dim dims
squeeze_ default dim dims
stack default
std correction default dim
std_mean correction default dim
sub Scalar Tensor
sub_ Scalar Tensor
sum default dim_IntList
swapaxes default
swapdims default
t default
take default
take_along_dim default
tan default
tanh default
tanh_ default
tensor_split indices sections
tensordot default
threshold default
threshold_ default
tile default
to device dtype dtype_layout other
topk default
transpose int
transpose_ default
tril default
tril_ default
tril_indices default
triu default
triu_ default
triu_indices default
trunc default
type_as default
unbind int
unflatten int
unfold default
uniform_ default
unsafe_chunk default
unsafe_split Tensor
unsafe_split_with_sizes default
unsqueeze default
unsqueeze_ default
upsample_bicubic2d default vec
upsample_bilinear2d default vec
upsample_linear1d default vec
upsample_nearest1d default vec
upsample_nearest2d default vec
upsample_nearest3d default vec
upsample_trilinear3d default vec
var correction default dim
var_mean correction default dim
view default dtype
view_as default
view_as_complex default
view_as_real default
vstack default
where Scalar ScalarOther ScalarSelf self
xlogy Tensor
zero_ default
zeros default
zeros_like default
_pad_circular default
_to_copy default
_unsafe_view default
_upsample_bicubic2d_aa default vec
_upsample_bilinear2d_aa default vec
_upsample_nearest_exact1d default vec
_upsample_nearest_exact2d default vec
_upsample_nearest_exact3d default vec
_weight_norm default
"""


def aten_names(text: str) -> frozenset[str]:
    """``aten.`` before each word of ``text``."""
    return frozenset(f"aten.{word}" for word in text.split())


def _read(table: str) -> frozenset[str]:
    names: set[str] = set()
    for line in table.split("\n"):
        packet, *overloads = line.split() or [""]
        names.update(f"aten.{packet}.{overload}" for overload in overloads)
    return frozenset(names)


ATEN_OPS: frozenset[str] = _read(_TABLE)
"""Tensor operations, as ``aten.name.overload``."""

RECOMPUTED_OPS: frozenset[str] = aten_names(
    """
    add.Scalar add.Tensor alias.default arange.default arange.start arange.start_step bitwise_and.Scalar
    bitwise_and.Tensor bitwise_not.default bitwise_or.Scalar bitwise_or.Tensor broadcast_to.default clone.default
    contiguous.default cumsum.default detach.default div.Tensor eq.Scalar eq.Tensor expand.default expand_as.default
    eye.default flatten.using_ints full.default full_like.default ge.Scalar ge.Tensor gt.Scalar gt.Tensor isinf.default
    isnan.default le.Scalar le.Tensor lift_fresh.default lift_fresh_copy.default logical_and.default
    logical_not.default logical_or.default lt.Scalar lt.Tensor masked_fill.Scalar masked_fill.Tensor mul.Scalar
    mul.Tensor ne.Scalar ne.Tensor neg.default new_full.default new_ones.default new_zeros.default ones.default
    ones_like.default permute.default repeat.default reshape.default rsub.Scalar rsub.Tensor scalar_tensor.default
    select.int slice.Tensor squeeze.default squeeze.dim squeeze.dims sub.Scalar sub.Tensor t.default to.device
    to.dtype to.dtype_layout transpose.int tril.default triu.default type_as.default unsqueeze.default view.default
    view_as.default where.ScalarOther where.ScalarSelf where.self zeros.default zeros_like.default
    """
)
"""Deterministic operations so cheap that a small result is computed again rather than sent."""
