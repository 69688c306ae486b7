"""Documents to train on: real ones, and made ones whose facts can be asked for; cut into tokens.

    real      texts that every Python has: its help, its standard library's source
    facts     records: lines with facts to be found again, from a seed, of any length
    dialogue  the same in plainer English: who said what, and when
    tokens    bytes, or GPT-2's byte pairs; which tokens some characters became
    packing   documents of any length, packed into sequences of one length
    streams   step → its sequences, so that a run that resumes sees the same data

Train on the answers only, and ask afterwards about a text that training never saw:

>>> from labsupport.training.documents.facts import records
>>> from labsupport.training.documents.streams import generated
>>> from labsupport.training.documents.tokens import ByteTokenizer, encode
>>> bytes_ = ByteTokenizer()
>>> def make(seed):
...     document = records(511, seed=seed, facts=10, questions=12, ask="throughout")
...     return encode(bytes_, document.text, wanted=document.answers)
>>> stream = generated(make, 512, end_token=bytes_.end_token)
>>> (packed,) = stream(0)
>>> packed.tokens.shape, int((packed.labels != -100).sum())  # twelve answers of two bytes
(torch.Size([1, 512]), 24)
>>> unseen = records(500, seed=0)
>>> question = unseen.questions[0]
>>> prompt = bytes_.encode(unseen.text + question.prompt)  # the model must go on with .answer
"""
